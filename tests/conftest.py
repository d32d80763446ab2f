import os

import jax

# XLA reads this when a backend starts. Most of the time goes into compiling: quickly is better
# than well.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
# Before any backend starts: every test runs on eight virtual devices.
jax.config.update("jax_num_cpu_devices", 8)
