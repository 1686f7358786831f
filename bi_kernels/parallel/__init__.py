"""Many GPUs, the same bits: weights cut over ranks whose parts are gathered, gradients joined in one order"""
