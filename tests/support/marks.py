"""Which files are `once` and which are `fast`; pyproject.toml says what the marks mean."""

# Compilers that run as programs, processes and signals, the browser, the site, the terminal: their
# tests do not depend on the version of Python, JAX or Flax. Each file with those of its tests that
# run on every Python all the same, so that nothing is seen on one alone.
ONCE = {
    "base/test_ending.py": ("test_closed_streams",),
    "base/test_files.py": ("test_a_saved_file_can_be_printed",),
    "base/test_terminal.py": (
        "test_json_matches_its_schema",
        "test_jax_is_not_imported_before_it_is_needed",
        "test_version",
    ),
    "checkpoint/test_faults.py": (
        "test_a_checkpoint_of_format_1",
        "test_a_flipped_bit_is_reported_with_the_name_of_the_array",
    ),
    # `.ci/run` runs `shardwise demo` on the other Python too.
    "cli/test_cli_run.py": ("test_train_saves_and_resumes_and_checkpoints_lists",),
    "cli/test_generate_cli.py": ("test_one_prompt_is_streamed",),
    "cli/test_names.py": ("test_a_failed_import_names_the_file_that_was_passed_over",),
    "cli/test_compile_cli.py": (
        "test_what_fits_has_status_0_as_text_as_json_and_saved",
        "test_plan_compiles_too",
        "test_doctor",
    ),
    "compile/test_absent.py": (
        "test_fsdp_gathers_kernels_and_scatters_gradients",
        "test_fields_that_a_version_does_not_know_are_left_out",
        "test_programs_partitioned_by_python_functions",
    ),
    "compile/test_compile_cache.py": ("test_a_damaged_entry_is_not_read_and_is_replaced",),
    "compile/test_noise.py": ("test_what_the_loss_prints_while_it_is_traced_reaches_the_user",),
    "estimate/test_peaks.py": ("test_rows_fill_registers_in_the_best_order",),
    "estimate/test_sequence.py": (),
    "learn/test_exercises.py": (
        "test_a_correct_solution_passes[init_sharded]",
        "test_a_correct_solution_passes[ring_sum]",
        "test_a_correct_solution_passes[step_bytes]",
        "test_a_correct_solution_passes[tensor_mlp]",
        "test_a_lesson_passes",
    ),
    "learn/test_learn.py": ("test_blocks_print_what_they_show[training]",),
    "memory/test_live.py": (
        "test_the_fullest_moment_is_the_peak_that_the_compiler_reports[scanned-gpu]",
        "test_lifetimes_by_the_order_of_a_program",
        "test_kinds_by_the_shapes_of_leaves",
    ),
    # Both run the tests that it repeats, with the flags of all tests.
    "package/test_usual_flags.py": ("test_no_page_claims_more",),
    "package/test_readme.py": ("test_both_sides_of_the_diff_place_the_same_kernels",),
    "package/test_docs.py": ("test_blocks_print_what_they_show[index]",),
    # `.ci/run` installs the package and runs `shardwise demo`, as the README says, on the other one.
    "package/test_wheel.py": (),
    "processes/test_launch.py": (
        "test_sums_are_those_of_one_process",
        "test_one_process_starts_nothing",
        "test_inconsistent_environments_are_refused",
    ),
    "weights/test_weights_processes.py": (),
    "processes/test_elastic.py": ("test_wrong_inputs",),
    "processes/test_hosts.py": (),
    "processes/test_processes.py": ("test_losses_of_two_are_those_of_one_process",),
    "report/test_report.py": ("test_the_command",),
    "report/test_report_pictures.py": (),
    # The other Python asks the same answers without a browser: studio/test_state.py.
    "studio/test_studio.py": ("test_without_its_libraries_it_says_what_to_install",),
}

# Tests that repeat one piece of code for many cases (of shapes, dtypes, meshes, optimizers, signals or
# drawn inputs), in files that are not `once`: what runs on every Python shows that its version does
# the same, and the other cases are about our arithmetic. Each test with its cases that every Python
# runs; without any, another test of the file runs the same code on every Python.
SWEEPS = {
    "hlo/test_lines.py": {"test_every_collective_of_a_decoder_has_a_line": ("scanned-gpu",)},
    "check/test_codes.py": {
        "test_page_runs": ("SW101", "SW104", "SW107", "SW202", "SW302", "SW403", "SW501"),
    },
    "checkpoint/test_checkpoints.py": {
        "test_a_save_that_is_refused_leaves_no_thread_writing": (),
        "test_from_layout_to_layout_and_back": (),
        "test_restores_bitwise_onto_any_layout": ("the same", "fsdp and tensor", "explicit"),
    },
    "checkpoint/test_digest.py": {
        "test_any_few_changed_words_change_it": (),
        "test_crafted_changes_all_have_another_digest": ("small",),
        "test_every_dtype_and_every_bit_of_it": ("float32", "bfloat16", "int4"),
        "test_many_arrays_are_few_programs": (),
        "test_no_mesh_and_no_spec_changes_it": (),
        "test_shape_and_dtype_belong_to_the_digest": ("small",),
    },
    "cli/test_cli.py": {"test_exit_status_and_streams": ("findings",)},
    "cli/test_wrong_lines.py": {"test_each_ends_in_one_sentence": ("0",)},
    "layout/test_optimizer.py": {
        "test_factored_parts_keep_the_dims_that_the_update_keeps": (),
        "test_sharded_update_equals_the_unsharded": ("decoder-adafactor", "scanned-multi-steps"),
        "test_state_is_sharded_like_its_parameters": (
            *(
                "decoder-adafactor",
                "decoder-muon",
                "scanned-adamw-mask",
                "scanned-inject-adafactor",
            ),
            *("scanned-multi-transform", "scanned-schedule-free"),
        ),
    },
    "layout/test_properties.py": {
        "test_bytes_per_device_are_the_sum_over_live_arrays": (),
        "test_every_spec_that_a_fault_suggests_is_accepted": (),
        "test_help_of_an_indivisible_dim_is_accepted_by_jax": (),
        "test_lockfile_keeps_every_path": (),
        "test_lockfile_round_trip": (),
        "test_patterns_match_as_a_simple_matcher_does": (),
        "test_shards_match_live_arrays": (),
        "test_suggested_axes_for_names_suit_every_leaf": (),
    },
    "layout/test_strategies.py": {
        "test_fsdp_leaves_only_a_small_share_of_the_model_and_of_each_device_unsplit": (
            *("8-256-data=8", "24-64-data=8,model=4"),
        ),
    },
    "layout/test_tensor.py": {
        "test_channels_are_split_through_operations_that_keep_them_separate": (
            *("depthwise", "average-pool", "batch-norm", "group-norm"),
        ),
    },
    "models/test_experts.py": {
        "test_a_step_on_a_mesh_equals_that_of_one_device": ("scanned-expert+tensor",),
    },
    "models/test_families.py": {
        "test_logits_are_those_of_transformers": (
            *("gemma2-scanned", "gemma3-unrolled", "llama3-scanned", "mixtral-scanned"),
        ),
        "test_load_and_save_weights": ("gemma3", "mixtral"),
        "test_logits_on_a_mesh": ("gemma2-fsdp+tensor", "mixtral-fsdp", "qwen2-tensor"),
    },
    "models/test_generate.py": {
        "test_greedy_tokens_are_those_of_transformers": ("gemma3-scanned", "mixtral-unrolled"),
        "test_greedy_tokens_on_a_mesh": ("tensor", "fsdp"),
        "test_tokens_are_drawn_with_their_probabilities": ("nucleus",),
    },
    "models/test_loss.py": {
        "test_a_sharded_step_takes_the_same_step_in_chunks": (
            *("fsdp-tied", "fsdp+tensor-head", "sequence-head", "accumulated-tied"),
        ),
        "test_chunks_change_neither_the_loss_nor_its_gradients": ("plain-4", "both-16"),
    },
    "models/test_models.py": {
        "test_no_device_holds_activations_of_the_whole_batch": (),
        "test_splash_attention_is_attention": ("grouped",),
    },
    "models/test_pipelined.py": {
        "test_losses_and_gradients_are_those_of_the_unsplit_model": (
            *("fsdp and tensor", "circular", "experts"),
        ),
    },
    "package/test_examples.py": {
        "test_it_equals_the_unsplit_computation": (
            *("data_parallel-real", "tensor_parallel-simulated", "pipeline_parallel-real"),
            "ring_attention-simulated",
        ),
        "test_the_budget_of_a_user_s_own_test": (),
    },
    "parallel/test_attention.py": {
        "test_any_shape": (),
        "test_global_arrays_on_a_mesh": ("causal-simulated", "grouped-real"),
        "test_in_a_body_with_data_and_tensor_axes": (
            *("heads split-simulated", "key heads replicated-real"),
        ),
    },
    "parallel/test_pipeline.py": {
        "test_a_global_stack_on_a_mesh": ("simulated-circular", "real-gpipe"),
        "test_in_a_body_with_a_data_axis": ("gpipe-simulated", "circular-real"),
        "test_the_timetable_is_what_runs": ("gpipe-None-11",),
    },
    "place/test_place.py": {
        "test_init_gives_the_same_values_in_shards": (
            *("mlp-data=2,model=4", "mixed-data=8", "tied-data=2,model=4", "sequential-model=8"),
            *("lora-data=8", "containers-data=2,model=4", "stacked-data=2,model=4"),
        ),
    },
    "simulate/test_simulate_collectives.py": {"test_any_program": ()},
    "search/test_search.py": {
        "test_a_fixed_axis_is_searched_and_trains": ("axes1-sequence",),
    },
    "step/test_recipe.py": {
        "test_optimizers": ("adamw", "adafactor", "multi-transform", "schedule-free"),
    },
    "train/test_fit.py": {
        "test_a_second_interrupt_ends_at_once": (),
        "test_a_signal_stops_after_a_complete_step_and_saves_it": ("15-143",),
        "test_sigterm_stops_a_run_whose_log_disk_is_full": (),
        "test_the_bar_of_a_terminal": (),
    },
    "train/test_train.py": {
        "test_loss_curves_are_those_of_one_device": (
            *("mlp-one", "mlp-dp", "mlp-fsdp+tensor", "conv-fsdp", "dropout-fsdp+tensor"),
            *("scanned-fsdp+tensor", "staged-pipeline+fsdp", "split-sequence"),
        ),
    },
    "train/test_zero_run.py": {
        "test_explicit_axes": ("zero1-all", "zero2-data"),
        "test_steps_are_those_of_data_parallelism": (
            *("plain-zero2", "all-zero1", "adafactor-zero2", "multi_steps-zero1"),
            *("line search-zero2", "offload-zero1"),
        ),
    },
    "weights/test_lora.py": {"test_from_a_folder_to_a_folder": ("int4",)},
}

# The files that say most about their room for a second or two of work.
FAST = (
    "weights/test_header.py",
    "weights/test_weight_names.py",
    "base/test_files.py",
    "check/test_codes.py",
    "check/test_match.py",
    "chips/test_chips.py",
    "cli/test_cli.py",
    "compile/test_scopes.py",
    "hlo/test_hlo.py",
    "jax/test_quick.py",
    "jax/test_values.py",
    "layout/test_layout.py",
    "layout/test_strategies.py",
    "mesh/test_mesh.py",
    "nnx/test_bytes.py",
    "package/test_api.py",
    "package/test_marks.py",
    "simulate/test_simulate_arguments.py",
    "train/test_data.py",
    "train/test_walk.py",
)
# Rooms of which nothing is cheap: they compile, write to disks, start processes or a browser, or run
# whole pages.
NOT_FAST = {
    "elastic",
    "search",
    "checkpoint",
    "learn",
    "memory",
    "models",
    "parallel",
    "place",
    "processes",
    "report",
    "step",
    "time",
    "estimate",
    "measure",
    "studio",
}


def marks_of(path, name):
    """Returns the marks of a test, of a file below `tests/` and with its parameters in its name."""
    found = []
    test, _, case = name.partition("[")
    seen_everywhere = SWEEPS.get(path, {}).get(test)
    if path in ONCE and not {name, test} & {*ONCE[path]}:
        found.append("once")
    elif seen_everywhere is not None and case.removesuffix("]") not in seen_everywhere:
        found.append("once")
    if path in FAST:
        found.append("fast")
    return found
