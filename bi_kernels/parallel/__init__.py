"""Many GPUs, the same bits: a step's gradients are added up in one order, wherever they are computed"""
