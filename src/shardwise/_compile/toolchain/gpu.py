"""The description of a GPU for XLA's compiler, rendered from the table of chips."""

from __future__ import annotations

from ..._chips import Chips

_REGISTERS = 65536


def target_config(chips: Chips) -> str:
    """Returns a text-format `GpuTargetConfigProto` for the GPUs of `chips`.

    It has what a datasheet has; which of its fields the installed compiler knows, the compiler
    itself is asked: see `worker.py`.
    """
    chip, gpu = chips.chip, chips.chip.gpu
    assert gpu is not None
    major, minor = gpu.capability
    # Architecture-specific kernels, which the compiler picks on real GPUs since Hopper.
    feature = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_bytes}
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(chip.hbm_bytes_per_second)}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {chip.capacity_bytes}
  shared_memory_per_block_optin: {gpu.shared_bytes - 1024}
  cuda_compute_capability {{
    major: {major}
    minor: {minor}
    {feature}
  }}
  registers_per_core_limit: {_REGISTERS}
  registers_per_block_limit: {_REGISTERS}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.19.0"
  device_vendor: "NVIDIA Corporation"
  name: "{chip.kind}"
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_address_bits: 64
  ecc_enabled: true
  reserved_shared_memory_per_block: 1024
  max_blocks_per_multiprocessor: 32
  collective_memory_granularity: 2097152
}}
platform_name: "CUDA"
device_description_str: "{chip.kind}"
runtime_version {{
  major: 13
}}
"""
