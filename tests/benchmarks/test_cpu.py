"""The CPU comparison: the model it makes, its figures, and a run of it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.cpu.__main__ import main
from benchmarks.cpu.http_server import MeasurementError, measure_server
from benchmarks.cpu.model import (
    bytes_per_token,
    bytes_per_token_of_file,
    make_tokenizer,
    write_model,
)
from benchmarks.cpu.shapes import SHAPES
from benchmarks.cpu.systems import OURS, make_systems
from benchmarks.cpu.table import share_line, table
from benchmarks.cpu.work import Result, Sent, Work
from benchmarks.gguf.writer import main as write_file

ROOT = Path(__file__).resolve().parents[2]
WORK = Work(users=2, requests=3, requests_of_one=1, dtype="fp32", quantize="int4", seed=0)


def run(*arguments):
    command = [sys.executable, "-m", "benchmarks.cpu", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_token_ids_decode_to_distinct_texts():
    size = 1000
    tokenizer = make_tokenizer(size)
    assert tokenizer.get_vocab_size() == size
    words = [tokenizer.decode([id]) for id in range(256, size)]
    assert len(set(words)) == len(words)
    for text in ("the and of it", "Ünï, 42!"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == f" {text}"
    assert len(tokenizer.encode("a to of it by").ids) == 5, "each word is one token"


def test_models_are_reproducible_and_transformers_loads_them(tmp_path):
    for name in ("one", "two"):
        write_model("dry", tmp_path / name)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    attention, mlp, norms = 2 * 64 * 64 + 2 * 64 * 32, 3 * 64 * 128, 2 * 64
    assert model.num_parameters() == 2 * 400 * 64 + 2 * (attention + mlp + norms) + 64
    assert len(AutoTokenizer.from_pretrained(tmp_path / "one")) == SHAPES["dry"]["vocab_size"]


def result(many, one):
    return Result(many, one, 1.0, [Sent(10, 5)])


def test_ratios_are_medians_over_pairs():
    ours = [result(100, 10), result(300, 30), result(90, 9)]
    # Our rates are 2, 3 and 1.5 times theirs; with one user, they are 0.5, 2 and 1 times theirs.
    theirs = [result(50, 20), result(100, 15), result(60, 9)]
    *_, first, second = table({"paged": ours, "vllm": theirs})
    assert first == "| paged, over HTTP | 100 (90 to 300) | 1.00× | 10 (9 to 30) | 1.00× |"
    assert second.endswith("| 60 (50 to 100) | 2.00× | 15 (9 to 20) | 1.00× |")
    *_, third, fourth = table({"paged": ours, "openvino": theirs, "offline": theirs})
    assert third.endswith("| 60 (50 to 100) | 1.00× | 15 (9 to 20) | 1.00× |"), (
        "OpenVINO runs offline, so it is compared with our offline run"
    )
    assert fourth.startswith("| paged, offline |")
    (*_, only) = table({"paged": ours[:1]})
    assert only == "| paged, over HTTP | 100 | 1.00× | 10 | 1.00× |"


def test_the_share_of_a_copy_is_that_of_the_weights_that_a_token_reads(tmp_path):
    write_model("dry", tmp_path)
    head, others = 400 * 64, 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    for precision, size in (("fp32", 4), ("bf16", 2), ("int8", 1)):
        assert bytes_per_token(tmp_path, precision) == size * (head + others)
    assert bytes_per_token(tmp_path, "int4") == head + others // 2
    line = share_line([result(9, 100), result(9, 50)], 80_000_000, [16e9, 20e9])
    assert "80.0 MB of weights a token, 35% of the rate of a copy (18.0 GB/s)" in line


def test_offline_systems_get_requests_of_the_same_sizes_as_ours(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    output = json.dumps({"tokens_per_s": 5.0, "tokens_per_s_of_one": 2.0, "start_s": 1.0})

    def run(command, **_):
        sent_requests.append(json.loads(Path(command[-1]).read_text()))
        return subprocess.CompletedProcess(command, 0, f"a warning\n{output}\n")

    sent_requests = []
    monkeypatch.setattr("benchmarks.cpu.systems.subprocess.run", run)
    sent = [Sent(3, 9), Sent(2, 4)]
    measure = make_systems({"openvino": Path()})["openvino"]
    for _ in range(2):
        found = measure(tmp_path, WORK, sent, tmp_path / "run")
        assert found == Result(5.0, 2.0, 1.0, sent)
    assert sent_requests[0] == sent_requests[1], "every round has the same requests"
    (first, first_answer), (second, second_answer) = sent_requests[0]["requests"]
    assert (len(first), first_answer, len(second), second_answer) == (3, 9, 2, 4)
    assert set(first + second) <= set(range(7))
    assert (sent_requests[0]["dtype"], sent_requests[0]["users"]) == ("float32", 2)
    assert sent_requests[0]["quantize"] == "int4"


@pytest.mark.parametrize("preload", ["", "a.so:b.so"])
def test_libraries_are_preloaded_into_vllm_s_server(preload, tmp_path, monkeypatch):
    def measure_server(command, environment, *_):
        return environment.get("LD_PRELOAD", "")

    monkeypatch.setattr("benchmarks.cpu.systems.measure_server", measure_server)
    measure = make_systems({"vllm": Path("python")}, preload)["vllm"]
    work = dataclasses.replace(WORK, dtype="bf16")
    assert measure(tmp_path, work, [], tmp_path) == preload


def test_servers_get_a_thread_for_each_core_that_a_run_may_use(tmp_path, monkeypatch):
    def measure_server(command, environment, *_):
        if "--threads" in command:
            return command[command.index("--threads") + 1]
        return environment["OMP_NUM_THREADS"]

    monkeypatch.setattr("benchmarks.cpu.systems.measure_server", measure_server)
    monkeypatch.setattr("benchmarks.cpu.systems.server_program", lambda python: "server")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 2, 5})
    (tmp_path / "model-Q4_0.gguf").touch()
    systems = make_systems({OURS: Path(), "vllm": Path(), "llama.cpp": Path()})
    found = [measure(tmp_path / "model", WORK, [], tmp_path) for measure in systems.values()]
    assert found == ["3", "3", "3"]


@pytest.mark.parametrize(
    ("dtype", "quantize", "kind"),
    [
        ("fp32", None, "F32"),
        ("bf16", None, "BF16"),
        ("fp32", "int8", "Q8_0"),
        ("bf16", "int4", "Q4_0"),
        ("fp32", "q4_k_m", "Q4_K_M"),
    ],
)
def test_llama_cpp_gets_the_same_weights_and_a_slot_for_each_user(
    dtype, quantize, kind, tmp_path, monkeypatch
):
    def run(command, **_):
        if "-c" in command:
            return subprocess.CompletedProcess(command, 0, "bin/llama-server\n")
        Path(command[-2 if command[-1].isdigit() else -1]).touch()
        written.append(command)
        return subprocess.CompletedProcess(command, 0, "")

    def measure_server(command, environment, ready, *_):
        return command, ready

    written = []
    monkeypatch.setattr("benchmarks.cpu.systems.subprocess.run", run)
    monkeypatch.setattr("benchmarks.cpu.systems.measure_server", measure_server)
    measure: Any = make_systems({"llama.cpp": Path("bin/python")})["llama.cpp"]
    model, file = tmp_path / "model", str(tmp_path / f"model-{kind}.gguf")
    writer = [sys.executable, "-m", "benchmarks.gguf.writer", str(model)]
    work = dataclasses.replace(WORK, dtype=dtype, quantize=quantize)
    measure(model, work, [], tmp_path)
    (program, *arguments), ready = measure(model, work, [], tmp_path)
    if kind == "Q4_K_M":
        whole, part = (str(tmp_path / name) for name in ("model-F32.gguf", "model-Q4_K_M.part"))
        quantized = ["bin/python", "-m", "benchmarks.gguf.quantizer", whole, part, "15"]
        expected = [[*writer, "F32", whole], quantized]
    else:
        expected = [[*writer, kind, file]]
    assert written == expected
    assert (program, ready) == ("bin/llama-server", "/health")
    flags = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert (flags["--model"], flags["--port"]) == (file, "{port}")
    assert (flags["--parallel"], flags["--ctx-size"]) == ("2", "2048")


def test_both_servers_get_the_same_q4_k_m_file(tmp_path, monkeypatch):
    def measure_server(command, environment, *_):
        served.append((command[-1] if "container" in command else command[2], environment))

    served = []
    monkeypatch.setattr("benchmarks.cpu.systems.measure_server", measure_server)
    monkeypatch.setattr("benchmarks.cpu.systems.server_program", lambda python: "server")
    (tmp_path / "model-Q4_K_M.gguf").touch()
    work = dataclasses.replace(WORK, quantize="q4_k_m")
    for measure in make_systems({"paged": Path(), "llama.cpp": Path()}).values():
        measure(tmp_path / "model", work, [], tmp_path)
    (ours, settings), (theirs, _) = served
    assert ours == theirs == str(tmp_path / "model-Q4_K_M.gguf")
    assert "OPTION_QUANTIZE" not in settings, "the file says how it is quantized"


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8), ("Q4_0", 4)])
def test_a_token_reads_the_codes_of_a_gguf_file(kind, bits, tmp_path):
    write_model("dry", tmp_path / "dry")
    write_file(str(tmp_path / "dry"), kind, str(tmp_path / "dry.gguf"))
    head, others = 400 * 64, 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    assert bytes_per_token_of_file(tmp_path / "dry.gguf") == head + others * bits // 8


@pytest.mark.parametrize(("kind", "head"), [("F32", "F32"), ("Q4_0", "Q8_0")])
def test_a_gguf_file_has_the_model_s_weights(kind, head, tmp_path):
    write_model("dry", tmp_path / "dry")
    write_file(str(tmp_path / "dry"), kind, str(tmp_path / "dry.gguf"))
    reader = gguf.GGUFReader(tmp_path / "dry.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 2 * 9 + 3
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "dry", dtype="float32").state_dict()
    for name, published, expected in (
        ("output", "lm_head", head),
        ("blk.1.ffn_down", "model.layers.1.mlp.down_proj", kind),
        ("blk.1.attn_norm", "model.layers.1.input_layernorm", "F32"),
    ):
        tensor = tensors[f"{name}.weight"]
        assert tensor.tensor_type.name == expected
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        error = abs(weight - stored[f"{published}.weight"].numpy()).max()
        assert error <= (0 if expected == "F32" else 0.01)
    if kind == "F32":  # the halves of a head alternate
        (query, expected) = (
            tensors["blk.0.attn_q.weight"].data,
            stored["model.layers.0.self_attn.q_proj.weight"].numpy(),
        )
        assert (query[0:4] == expected[[0, 16, 1, 17]]).all()


def test_a_server_that_does_not_start_is_reported_with_its_last_output(tmp_path):
    command = [sys.executable, "-c", "import sys; print('no memory'); sys.exit(3)"]
    with pytest.raises(MeasurementError, match="no memory"):
        measure_server(command, {}, "/ping", WORK, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vs", "vlm"], "unknown system vlm; choose from vllm, llama.cpp, openvino, offline"),
        (["--vs", "offline", "--peer-python", "x"], "--peer-python is for one system"),
        (
            ["--vs", "vllm", "--quantize", "int8"],
            "--quantize can only be used with --vs llama.cpp, openvino, offline",
        ),
        (
            ["--vs", "llama.cpp,openvino", "--quantize", "q4_k_m"],
            "--quantize q4_k_m needs --vs llama.cpp, which writes the file, alone",
        ),
        (
            ["--vs", "llama.cpp", "--quantize", "q4_k_m", "--shape", "lfm2-1.2b"],
            "our server reads no GGUF files of --shape lfm2-1.2b",
        ),
        (["--preload", "a.so"], "--preload is for vLLM's server: use it with --vs vllm"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.matrix(cases=0)
@pytest.mark.timeout(300)  # starts a server
def test_the_comparison_runs(tmp_path):
    done = run("--dry", "--vs", "offline", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "cpu.json").read_text())
    assert list(found["runs"]) == ["paged", "offline"]
    (ours,), (offline,) = found["runs"].values()
    assert ours["sent"] == offline["sent"]
    assert len(ours["sent"]) == 4
    assert {request["answer"] for request in ours["sent"]} <= {64, 128, 256}
    assert min(request["prompt"] for request in ours["sent"]) >= 60
    assert ours["tokens_per_s"] > 0
    assert min(offline["tokens_per_s"], offline["tokens_per_s_of_one"]) > 0
    assert "torch" in found["versions"]["paged"]
    *_, share, machine = lines = done.stdout.splitlines()
    assert len(lines) == 6, "a table of two systems, the share of a copy and the machine"
    assert "0.4 MB of weights a token" in share
    assert found["machine"] in machine


@pytest.mark.matrix(cases=0)
def test_every_system_quantizes_its_weights(tmp_path, monkeypatch, capsys):
    """Only the offline system really runs. Of the server, only the environment is checked."""

    def serve(command, environment, *_):
        environments.append(environment)
        return result(100, 10)

    environments = []
    monkeypatch.setattr("benchmarks.cpu.systems.measure_server", serve)
    arguments = ["--dry", "--vs", "offline", "--quantize", "int8", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["benchmarks.cpu", *arguments])
    assert main() == 0
    assert [environment["OPTION_QUANTIZE"] for environment in environments] == ["int8"]
    found = json.loads((tmp_path / "cpu.json").read_text())
    assert found["work"]["quantize"] == "int8"
    assert found["runs"]["offline"][0]["tokens_per_s"] > 0
    assert "; int8; " in capsys.readouterr().out.splitlines()[-1]


def test_a_large_model_gets_fewer_requests_and_time_for_each(tmp_path, monkeypatch):
    def serve(command, environment, ready, work, folder):
        served.append((environment["OPTION_PREDICT_TIMEOUT"], work.requests, work.requests_of_one))
        return result(100, 10)

    served = []
    monkeypatch.setattr("benchmarks.cpu.systems.measure_server", serve)
    arguments = ["--shape", "dry", "--requests", "5", "--requests-of-one", "2", "--rounds", "1"]
    monkeypatch.setattr("sys.argv", ["benchmarks.cpu", *arguments, "--out", str(tmp_path)])
    assert main() == 0
    assert served == [("3600", 5, 2)]


def test_ours_also_runs_offline_beside_an_offline_system(tmp_path, monkeypatch):
    def make_systems(pythons, preload):
        return {name: lambda *_: result(100, 10) for name in pythons}

    monkeypatch.setattr("benchmarks.cpu.__main__.make_systems", make_systems)
    arguments = ["--dry", "--vs", "openvino", "--peer-python", sys.executable]
    monkeypatch.setattr("sys.argv", ["benchmarks.cpu", *arguments, "--out", str(tmp_path)])
    assert main() == 0
    found = json.loads((tmp_path / "cpu.json").read_text())
    assert list(found["runs"]) == ["paged", "openvino", "offline"]
