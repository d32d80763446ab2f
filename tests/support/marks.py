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
    "cli/test_cli_run.py": ("test_demo_shows_a_whole_run",),
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
    "learn/test_exercises.py": ("test_a_correct_solution_passes", "test_a_lesson_passes"),
    "learn/test_learn.py": ("test_blocks_print_what_they_show[training]",),
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
    "processes/test_processes.py": ("test_losses_of_two_are_those_of_one_process",),
    "report/test_report.py": ("test_the_command",),
}

# The files that say most about their room for a second or two of work.
FAST = (
    "base/test_files.py",
    "check/test_codes.py",
    "check/test_match.py",
    "chips/test_chips.py",
    "cli/test_cli.py",
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
NOT_FAST = {"checkpoint", "learn", "models", "parallel", "place", "processes", "report", "step"}


def marks_of(path, name):
    """Returns the marks of a test, of a file below `tests/` and with its parameters in its name."""
    found = []
    if path in ONCE and not {name, name.partition("[")[0]} & {*ONCE[path]}:
        found.append("once")
    if path in FAST:
        found.append("fast")
    return found
