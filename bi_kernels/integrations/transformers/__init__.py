"""Hugging Face Transformers: `apply` puts our ops into a model, in place, and `restore` takes them out."""

from bi_kernels.extras import extra

with extra("transformers"):
    from bi_kernels.integrations.transformers.data_parallel import StepSampler
    from bi_kernels.integrations.transformers.replace import apply, restore
    from bi_kernels.integrations.transformers.scoring import logprobs

__all__ = ["StepSampler", "apply", "logprobs", "restore"]
