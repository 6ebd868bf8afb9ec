"""Full and sharded state dicts, with the names and options of torch.distributed.checkpoint.state_dict."""
