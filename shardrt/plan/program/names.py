"""What options of a forecast may be: names, so that the command line is read without torch."""

AXES = ("pp", "tp", "cp", "ep")
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}  # names in torch.optim
GRADIENT_SYNCS = {"every": "last", "last": "every"}  # micro-batches that reduce, and the other choice
SCHEDULES = ("1f1b", "gpipe")  # orders of forwards and backwards in a pipeline
