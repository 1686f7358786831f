"""Models of Hugging Face Transformers after `apply`: every layout, split, cache and trainer, beside the stock model"""
