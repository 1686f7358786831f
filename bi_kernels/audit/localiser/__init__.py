"""The localiser: the first op of a model whose inputs agree between two layouts and whose outputs do not"""
