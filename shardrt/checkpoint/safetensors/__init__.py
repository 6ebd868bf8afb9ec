"""Hugging Face's safetensors, in and out."""
