"""The command `generate`: a folder of transformers with a tokenizer, on one device and on eight."""

import json
import shlex
import shutil

import pages
import pytest
import schemas
from families import FOLDER, expected_of
from tokenizers import Tokenizer, models, pre_tokenizers

LLAMA = expected_of("llama2")
PROMPTS = [
    " ".join(f"w{token}" for token in row[:length])
    for row, length in zip(LLAMA["tokens"], LLAMA["prompt_lengths"], strict=False)
]
WANTED = LLAMA["generated"].tolist()


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A copy of a checkpoint, with a tokenizer whose words are `w0`, `w1`, …."""
    path = tmp_path / "llama"
    shutil.copytree(FOLDER / "llama2", path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(104)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(path / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    return path


def words(tokens):
    return "".join(f" w{token}" for token in tokens)


def test_one_prompt_is_streamed(run, checkpoint):
    status, out, err = run("generate", "llama", "--prompt", PROMPTS[1], "--tokens", "12")
    assert (status, out) == (0, f"{words(WANTED[1])}\n"), err


def test_several_prompts_on_a_mesh_as_json(run, checkpoint):
    # Of eight sequences, three are there only to fill the mesh.
    arguments = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    mesh = ("--mesh", "data=8", "--on", "cpu:8", "--strategy", "dp")
    status, out, err = run(
        "generate", "llama", *arguments, "--tokens", "12", *mesh, "--format", "json"
    )
    assert status == 0, err
    found = json.loads(out)
    schemas.validate("generate", found)
    assert (found["axes"], found["dtype"]) == ("data=8", "float32")
    assert [row["tokens"] for row in found["answers"]] == WANTED
    assert [row["text"] for row in found["answers"]] == [words(row) for row in WANTED]
    assert not any(row["ended"] for row in found["answers"])


def test_a_text_ends_at_its_end(run, checkpoint):
    # The token that ends a text is not part of it.
    end = WANTED[0][5]
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    status, out, _ = run("generate", "llama", "--prompt", PROMPTS[0], "--tokens", "12")
    assert (status, out) == (0, f"{words(WANTED[0][: WANTED[0].index(end)])}\n")


def test_a_seed_draws_the_same_text(run, checkpoint):
    drawn = ("--temperature", "3", "--top-p", "0.9", "--tokens", "8")
    texts = [
        run("generate", "llama", "--prompt", PROMPTS[0], *drawn, "--seed", seed)[1]
        for seed in ("1", "1", "2")
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_examples_of_its_help_run(run, checkpoint):
    shutil.copytree(checkpoint, checkpoint.parent / "llama-3.2-1b")
    examples = pages.help_examples(run("generate", "--help")[1])
    assert len(examples) == 2
    for line in examples:
        status, out, err = run(*shlex.split(line)[1:])
        assert status == 0 and len(out.split()) in (64, 200), err


def test_weights_that_do_not_fit_are_findings(run, checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    status, out, _ = run("generate", "llama", "--prompt", "w1")
    assert status == 1 and "SW60" in out and "blocks.0.up" in out


WRONG = {
    "no tokenizer": (
        lambda path: (path / "tokenizer.json").unlink(),
        (),
        "llama has no tokenizer.json: give a folder with a model and a tokenizer",
    ),
    "no config": (
        lambda path: (path / "config.json").unlink(),
        (),
        "config.json cannot be read: No such file or directory",
    ),
    "another model": (
        lambda path: (path / "config.json").write_text('{"model_type": "gpt2"}'),
        (),
        "model_type is 'gpt2': supported are gemma2, ",
    ),
    "dtype": (None, ("--dtype", "int8"), "--dtype int8 is not supported: give one of float32"),
    "prompt": (None, ("--prompt", ""), "--prompt '' has no tokens"),
    "pipeline": (
        None,
        ("--mesh", "pipe=8", "--on", "cpu:8", "--strategy", "pipeline"),
        "--strategy pipeline: a cache is not pipelined; use tensor, fsdp or dp",
    ),
    "none": (None, ("--on", "none"), "--on none has no devices to generate on"),
    "mesh": (None, ("--on", "cpu:8"), "--on cpu:8 needs --mesh"),
    "temperature": (None, ("--temperature", "-1"), "temperature must not be negative, got -1.0"),
    "top_p": (None, ("--top-p", "2"), "top_p must be above 0 and at most 1, got 2.0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_lines(run, checkpoint, case):
    change, arguments, words = WRONG[case]
    if change is not None:
        change(checkpoint)
    status, out, err = run("generate", "llama", "--prompt", "w1", *arguments)
    assert (status, out) == (2, "") and words in err
    assert "Traceback" not in err
