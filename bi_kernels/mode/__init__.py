"""Routes what a model of any library asks of PyTorch to this package's ops."""
