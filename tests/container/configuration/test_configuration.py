"""serving.properties and the environment: sources, values, errors, and where the model is."""

from __future__ import annotations

import shutil
from fnmatch import fnmatch
from pathlib import Path

import javaproperties
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.__main__ import main
from container.configuration.lmi import ADVICE
from container.configuration.properties import parse_properties
from container.configuration.report import facts_lines, url_host
from container.configuration.resolve import Configuration
from container.model_files.directory import model_place, resolve_model_dir
from core.configuration.batching import choose_batching
from core.configuration.options import option_table
from core.errors import ConfigurationError
from tests.container.configurations import Load, refusal
from tests.container.fake_engine import FACTS

AWS_FILES = {
    "dynamic": """engine=Python
option.entryPoint=djl_python.huggingface
batch_size=64
max_batch_delay=1000
option.tensor_parallel_degree=2
""",
    "continuous": """engine=MPI
option.entryPoint=djl_python.huggingface
option.rolling_batch=auto
option.max_rolling_batch_size=64
option.paged_attention=false
option.max_rolling_batch_prefill_tokens=16080
option.tensor_parallel_degree=2
""",
    "paged": """engine=MPI
option.entryPoint=djl_python.huggingface
option.rolling_batch=auto
option.max_rolling_batch_size=64
option.paged_attention=true
option.max_rolling_batch_prefill_tokens=16080
option.tensor_parallel_degree=2
""",
}


@pytest.mark.parametrize("strategy", AWS_FILES)
def test_the_files_of_awss_article_on_batching(load: Load, strategy: str) -> None:
    configuration = load(AWS_FILES[strategy])
    assert choose_batching(configuration.options.strategy).name == strategy
    assert configuration.warnings == ()


@pytest.mark.parametrize("strategy", AWS_FILES)
def test_explain_names_the_strategy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    path = tmp_path / "serving.properties"
    path.write_text(AWS_FILES[strategy])
    assert main(["explain", "--properties", str(path)]) == 0
    output = capsys.readouterr().out
    assert f"  batching: {strategy} (" in output
    assert f"{path}:2" in output


def test_sources_and_lines(load: Load) -> None:
    text = "# a comment\n\nengine: MPI\nbatch_size = \\\n   4   \noption.dtype fp32\n"
    configuration = load(text)
    assert configuration.options.strategy.batch_size == 4
    assert configuration.options.execution.dtype == "fp32"
    lines = {name: source.rsplit(":", 1)[1] for name, source in configuration.sources.items()}
    assert lines == {"engine": "3", "batch_size": "4", "dtype": "6"}


@pytest.mark.parametrize(
    ("line", "chosen"),
    [
        ("option.speculative_method=suffix", ("suffix", 5)),
        ("option.speculative_method=ngram\noption.speculative_length=3", ("ngram", 3)),
        ("option.speculative_method=ngram\noption.spec_length=3", ("ngram", 3)),
        ("option.draft_model_id=small\noption.spec_length=3", ("draft_model", 3)),
        ('option.speculative_config={"method": "ngram"}', ("ngram", 5)),
    ],
)
def test_other_names_of_options_of_speculation(
    load: Load, line: str, chosen: tuple[str, int]
) -> None:
    assert load(line + "\n").options.speculation.chosen == chosen


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("option.roling_batch=auto", "unknown key 'option.roling_batch'; did you mean "
         "'option.rolling_batch'?"),
        ("rolling_batch=auto", "did you mean 'option.rolling_batch'?"),
        ("option.batch_size=4", "did you mean 'batch_size'?"),
        ("batch_size=four", "batch_size=four: expected an integer"),
        ("batch_size=0", "must be at least 1"),
        ("option.paged_attention=maybe", "expected true or false"),
        ("option.batching=pagd", "did you mean 'paged'?"),
        ("option.rolling_batch=trtllm", "use option.rolling_batch=auto"),
        ("option.rolling_batch=deepspeed", "use option.rolling_batch=auto"),
        ("option.load_format=safetensors", "use option.load_format=auto"),
        ("engine=DeepSpeed", "use engine=Python"),
        ("option.dtype=\\u12", "\\u12"),
        ("option.speculative_config={", "option.speculative_config: Input data was truncated"),
        ("option.num_speculative_tokens=32", "must be at most 16"),
    ],
)  # fmt: skip
def test_invalid_configurations(load: Load, line: str, message: str) -> None:
    assert message in refusal(load, line + "\n")


def test_all_errors_are_reported_at_once(load: Load) -> None:
    lines = refusal(load, "engin=Python\n\nbatch_size=x\n", {"OPTION_DTYP": "fp32"}).splitlines()
    assert len(lines) == 3
    assert "environment variable OPTION_DTYP: no such option; did you mean 'OPTION_DTYPE'?" in lines
    assert any("serving.properties:1: unknown key 'engin'" in line for line in lines)
    assert any("serving.properties:3: batch_size=x" in line for line in lines)


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("minWorkers=2", "use option.copies"),
        ("load_on_devices=0", "use option.device"),
        ("option.mpi_mode=true", "starts the ranks"),
        ("option.load_in_4bit=true", "option.quantize=int4"),
        ("option.enable_streaming=true", '"stream": true'),
        ("chunked_read_timeout=60", "option.predict_timeout"),
    ],
)
def test_lmi_keys_without_effect_give_warnings(load: Load, line: str, advice: str) -> None:
    (warning,) = load(line).warnings
    assert "serving.properties:1: " in warning
    assert advice in warning


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("option.quantize=int8", "int8"),
        ("option.quantize=bitsandbytes8", "int8"),
        ("option.quantization=awq", "awq"),
        ("option.quantize=gptq_marlin", "gptq"),
    ],
)
def test_names_of_quantization(load: Load, line: str, expected: str) -> None:
    assert load(line).options.execution.quantize == expected


@pytest.mark.parametrize("name", ["OPTION_QUANTIZE", "OPTION_QUANTIZATION", "HF_MODEL_QUANTIZE"])
def test_variables_of_quantization(load: Load, name: str) -> None:
    assert load("", {name: "fp8"}).options.execution.quantize == "fp8"


def test_the_last_of_repeated_keys_wins(load: Load) -> None:
    configuration = load("batch_size=2\nmax_dynamic_batch_size=3\n")
    assert configuration.options.strategy.batch_size == 3
    assert "max_dynamic_batch_size repeats" in configuration.warnings[0]


@pytest.mark.parametrize(
    "entry_point",
    [
        "djl_python.huggingface",
        "djl_python.lmi_vllm.vllm_async_service",
        "djl_python.rolling_batch",
    ],
)
def test_built_in_handlers(load: Load, entry_point: str) -> None:
    assert load(f"option.entryPoint={entry_point}").options.user_code.entryPoint == entry_point


def test_lmi_values_are_translated(load: Load) -> None:
    assert load("option.output_formatter=sse_chat").options.server.output_formatter == "sse"


@given(
    st.dictionaries(
        st.text("ab.\u00e9 :=#!\\", min_size=1, max_size=5),
        st.text("ab\u00e9 :=#!\\\t", max_size=8).map(str.strip),
    )
)
def test_java_properties_files_are_parsed(entries: dict[str, str]) -> None:
    text = javaproperties.dumps(entries, timestamp=None)
    assert {entry.key: entry.text for entry in parse_properties(text, "file")} == entries


def test_a_model_next_to_its_properties_file(
    load: Load, tokenizer_dir: Path, tmp_path: Path
) -> None:
    relative = Path("models") / "one"
    shutil.copytree(tokenizer_dir, tmp_path / relative)
    configuration = load(f"option.model_id={relative}")
    assert resolved_dir(configuration, tokenizer_dir) == tmp_path / relative
    assert resolved_dir(load(""), tokenizer_dir) == tokenizer_dir


def resolved_dir(configuration: Configuration, model_dir: Path) -> Path:
    return resolve_model_dir(model_place(configuration, model_dir), configuration.options.model)


@pytest.mark.parametrize(
    ("model_id", "message"),
    [
        ("", "config.json is missing"),
        ("./nowhere", "there is no directory"),
        ("djl://model", "expected a path"),
    ],
)
def test_no_model(load: Load, tmp_path: Path, model_id: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolved_dir(load(f"option.model_id={model_id}"), tmp_path)


def test_an_unreachable_hub(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ConfigurationError, match=r"no network.*use a local directory"):
        resolved_dir(load("option.model_id=someone/something"), tmp_path)


@pytest.mark.parametrize(("load_format", "is_fetched"), [("auto", True), ("dummy", False)])
def test_with_random_weights_no_weights_are_downloaded(
    load: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    load_format: str,
    is_fetched: bool,
) -> None:
    files = ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin")

    def download(_: str, *, revision: str | None, ignore_patterns: list[str]) -> str:
        for name in files:
            if not any(fnmatch(name, pattern) for pattern in ignore_patterns):
                (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    path = resolved_dir(
        load(f"option.model_id=someone/something\noption.load_format={load_format}"), tmp_path
    )
    assert (path / "model.safetensors").exists() == is_fetched
    assert not (path / "pytorch_model.bin").exists()


def test_no_option_is_listed_as_without_effect():
    """A key that becomes an option must be removed from the table of LMI keys without effect."""
    assert not ADVICE.keys() & {row.key for row in option_table().values()}


def test_the_start_says_how_many_bytes_a_weight_takes() -> None:
    assert "weights 1.0 MiB, KV" in "\n".join(facts_lines(FACTS))
    facts = msgspec.structs.replace(FACTS, quantization="int4", num_weights=2**21)
    text = "\n".join(facts_lines(facts))
    assert "weights 1.0 MiB in int4 (0.50 bytes per weight), KV" in text


def test_the_start_says_whose_layers_compute_a_task() -> None:
    facts = msgspec.structs.replace(FACTS, executor="task", encoder="own (bert)")
    assert "  encoder: own (bert)" in facts_lines(facts)


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("", "localhost"),
        ("::", "localhost"),
        ("0.0.0.0", "localhost"),
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "[::1]"),
    ],
)
def test_the_host_of_the_printed_url(host: str, shown: str) -> None:
    assert url_host(host) == shown
