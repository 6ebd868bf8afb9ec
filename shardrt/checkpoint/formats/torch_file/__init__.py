"""What torch.save writes, without torch: archives of tensors and objects, and what is refused of those that others give."""
