"""Tests run on eight fake CPU devices; XLA reads these before jax is imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("NPROC", "16")  # fewer threads than devices can deadlock XLA's CPU collectives
flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in flags:
  os.environ["XLA_FLAGS"] = flags + " --xla_force_host_platform_device_count=8"
