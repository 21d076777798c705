"""mgrpo_jax: training teams of language models with M-GRPO in JAX."""
