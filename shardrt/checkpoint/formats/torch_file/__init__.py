"""Files of torch.save, written and read without it: archives of tensors and objects, and checks that refuse harmful ones."""
