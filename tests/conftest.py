import jax

# Before any backend starts: every test runs on eight virtual devices.
jax.config.update("jax_num_cpu_devices", 8)
