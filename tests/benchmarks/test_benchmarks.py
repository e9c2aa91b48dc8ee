"""The benchmarks run, their baselines are right, and what they report follows from what they measure."""

import errno
import json
import tempfile
from functools import partial

import pytest
import torch
from laws.cases import assert_close
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import acceptance, cases, layers, measure, peers
from benchmarks.__main__ import COMMANDS, main, parse
from benchmarks.report import Column, Report, table
from training import flops

SHAPE = cases.Shape(1, 2, 16)
OPERATORS = cases.operators("cpu")
PLAIN_PEERS = {
    "linear": {"fla, plain"},
    "delta_net": {"in-tree", "fla, plain"},
    "gated_delta_net": {"in-tree", "fla, plain"},
    "mesa_net": {"fla, plain"},
    "ttt_linear": {"TTT reference"},
    "ttt_mlp": {"TTT reference"},
}
MEGABYTE = 2**20


@pytest.fixture(autouse=True)
def threads():
    """The commands set the number of threads; other tests keep theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "acceptance"])
def test_quick(command, tmp_path, capsys):
    """Every command at small sizes: rows without holes in the first columns, and the three files."""
    report = main([command, "--quick", "--threads", "1", "--output", str(tmp_path)])
    module = COMMANDS[command]
    assert report.rows and report.machine["threads"] == 1
    for row in report.rows:
        assert row[module.COLUMNS[0].key] is not None
        for name, value in row.items():
            if name.endswith(("seconds", "ratio", "_ms")) and value is not None:
                assert value > 0, name
    assert Report.load(tmp_path / f"{command}.json") == report
    text = (tmp_path / f"{command}.md").read_text()
    assert text in capsys.readouterr().out
    assert len([line for line in text.splitlines() if line.startswith("|")]) == len(report.rows) + 2
    assert (tmp_path / f"{command}.png").read_bytes().startswith(b"\x89PNG")


def test_quick_keeps_nothing_unless_told():
    assert parse(["ops", "--quick"]).output is None
    assert parse(["ops"]).output is not None
    settings = parse(["ops", "--quick", "--lengths", "7", "9"])
    assert settings.lengths == [7, 9]
    assert settings.dim == COMMANDS["ops"].OPTIONS["dim"].quick


def refused(argv: list[str], capsys) -> str:
    """What a command that is refused before it measures says."""
    with pytest.raises(SystemExit) as found:
        parse(argv)
    assert found.value.code == 2
    return capsys.readouterr().err


WHOLE_OPTIONS = [
    (command, name, option)
    for command, module in COMMANDS.items()
    for name, option in module.OPTIONS.items()
    if isinstance(option.full[0] if isinstance(option.full, list) else option.full, int)
]
# What 0 means something for: no such measurement, no such stage of training, or a seed.
ZERO = {
    "training": {"memory_tokens"},
    "growth": {"longest_softmax"},
    "conversion": {"align_tokens", "distil_tokens", "first_distil_tokens"},
    "selection": {"align_tokens"},
    "pretraining": {"seeds"},
}


@pytest.mark.parametrize(("command", "name", "option"), WHOLE_OPTIONS)
def test_numbers_that_are_too_small_are_refused(command, name, option, capsys):
    flag = f"--{name.replace('_', '-')}"
    for number in (option.least - 1, -7):
        message = refused([command, "--quick", flag, str(number)], capsys)
        assert f"argument {flag}: {number} is too small; give {option.least} or more" in message
    found = getattr(parse([command, "--quick", flag, str(option.least)]), name)
    assert found == ([option.least] if isinstance(option.full, list) else option.least)
    assert (option.least == 0) == (name in ZERO.get(command, ()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "0"], "argument --threads: 0 is too small; give 1 or more"),
        (["--lengths", "64", "0"], "argument --lengths: 0 is too small; give 1 or more"),
        (["--lengths", "4k"], "argument --lengths: '4k' is no whole number; give 1 or more"),
        *((["--seconds", text], f"argument --seconds: '{text}' is no finite number") for text in ("0", "nan", "inf")),
        (["--seconds", "-1"], "argument --seconds: '-1' is no finite number above 0; give one such as 0.5"),
    ],
)
def test_malformed_numbers_are_refused(arguments, message, capsys):
    assert message in refused(["ops", "--quick", *arguments], capsys)


@pytest.mark.parametrize(
    ("command", "flag"), [("ops", "dtypes"), ("layers", "dtypes"), ("roofline", "dtypes"), ("pretraining", "arms")]
)
def test_unknown_words_are_refused(command, flag, capsys):
    known = list(COMMANDS[command].OPTIONS[flag].known)
    message = refused([command, "--quick", f"--{flag}", known[0], "fp8"], capsys)
    assert f"argument --{flag}: invalid choice: 'fp8'" in message and all(name in message for name in known)


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path, capsys, monkeypatch):
    file = tmp_path / "file"
    file.write_text("kept")
    reasons = {file: "it is a file", file / "results": "Not a directory"}
    for folder, reason in reasons.items():
        message = refused(["ops", "--output", str(folder)], capsys)
        assert f"argument --output: {folder} cannot be written ({reason}); name another folder" in message
    assert file.read_text() == "kept"
    folder = tmp_path / "new" / "results"
    assert parse(["ops", "--output", str(folder)]).output == folder
    assert folder.is_dir() and not list(folder.iterdir())

    def deny(**_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", deny)
    assert f"{folder} cannot be written (Permission denied)" in refused(["ops", "--output", str(folder)], capsys)


def test_cuda_is_refused_where_there_is_none(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = tmp_path / "results"
    message = refused(["ops", "--device", "cuda", "--output", str(folder)], capsys)
    assert "argument --device: cuda: PyTorch finds no CUDA device here; use --device cpu" in message
    assert not folder.exists()


def test_peers_are_left_out_at_lengths_that_they_do_not_take():
    """The limits are those of the functions: one token more than whole chunks fails, whole chunks do not."""
    limits = {
        (name, peer_name): peer
        for name, operator in OPERATORS.items()
        for peer_name, peer in operator.peers.items()
        if peer.multiple > 1
    }
    assert set(limits) == {("delta_net", "fla, plain"), ("mesa_net", "fla, plain")}
    for (name, _), peer in limits.items():
        chunk = peer.multiple
        assert [peer.takes(length, "fp32") for length in (1, chunk, chunk + 1, 2 * chunk)] == [False, True, False, True]
        assert not peer.takes(8192, "fp32") and not peer.takes(chunk, "bf16")
        inputs = {length: cases.make_inputs(OPERATORS[name].gates, length, SHAPE) for length in (chunk, chunk + 1)}
        assert cases.make_pass(peer.function, inputs[chunk], backward=False)()[0].shape[1] == chunk
        with pytest.raises((AssertionError, RuntimeError)):
            cases.make_pass(peer.function, inputs[chunk + 1], backward=False)()


def test_operators_are_compared_at_a_length_that_no_chunk_divides():
    settings = parse(["ops", "--quick", "--dtypes", "fp32"])
    cases_of_two = {name: OPERATORS[name] for name in ("delta_net", "gated_delta_net")}
    differences = {name: {} for name in cases_of_two}
    rows = COMMANDS["ops"].compare(settings, cases_of_two, differences, SHAPE, 20, "forward", False)
    assert [(row["operator"], row["peer"]) for row in rows] == [
        ("delta_net", "in-tree"),
        ("delta_net", cases.SOFTMAX),
        ("gated_delta_net", "in-tree"),
        ("gated_delta_net", "fla, plain"),
        ("gated_delta_net", cases.SOFTMAX),
    ]


def test_growth_of_an_operator_that_is_not_measured_at_the_reference(monkeypatch):
    growth = COMMANDS["growth"]
    monkeypatch.setattr(growth, "in_fresh_process", lambda *_: 1000)
    arguments = ["--lengths", "16", "32", "--longest-softmax", "16", "--reference", "32"]
    _, rows, _ = growth.measure(parse(["growth", "--quick", *arguments]))
    assert [row["tokens"] for row in rows if row["operator"] == cases.SOFTMAX] == [16]
    assert [row["operator"] for row in rows if "time_growth" not in row] == [cases.SOFTMAX]


@pytest.mark.parametrize("name", PLAIN_PEERS)
def test_peers_compute_the_same(name):
    """Outputs and all gradients, at a length that no chunk or mini-batch divides where the peer allows one."""
    length = 72 if name.startswith("ttt") else 128
    differences = cases.check_peers(name, OPERATORS[name], SHAPE, "cpu", length)
    assert set(differences) == PLAIN_PEERS[name]
    for peer, difference in differences.items():
        assert difference <= (1e-2 if name == "mesa_net" else 1e-5), peer


def test_a_peer_that_differs_is_not_timed():
    operator = OPERATORS["delta_net"]
    wrong = cases.Peer(lambda **inputs: 1.01 * operator.run(**inputs))
    with pytest.raises(ValueError, match="delta_net: wrong differs by 1.0e-02"):
        cases.check_peers("delta_net", operator._replace(peers={"wrong": wrong}), SHAPE, "cpu")


def test_softmax_attention_is_causal():
    q, k, v = (torch.randn(2, 5, 3, 4) for _ in range(3))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / 2
    weights = scores.masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf).softmax(-1)
    assert_close(peers.softmax_attention(q, k, v), torch.einsum("bhts,bshd->bthd", weights, v), 1e-6)


@pytest.mark.parametrize("memory", ["ttt_linear", "ttt_mlp"])
def test_ttt_reference_layer_is_our_layer(memory):
    """The baseline of the layer table: the paper's loop, here with an unfinished last mini-batch."""
    ours, reference = (make(memory, cases.QUICK_MODEL_SHAPE) for make in (layers.make_mixer, layers.make_ttt_reference))
    x, do = torch.randn(2, 37, 32, requires_grad=True), torch.randn(2, 37, 32)
    outputs = [layer(x)[0] for layer in (ours, reference)]
    assert_close(*outputs, 1e-5)
    grads = [
        torch.autograd.grad(o, [x, *layer.parameters()], do)
        for o, layer in zip(outputs, (ours, reference), strict=True)
    ]
    for actual, expected in zip(*grads, strict=True):
        assert_close(actual, expected, 1e-4)


def test_mesa_is_compared_at_the_residual_of_the_peer():
    _, errors = cases.mesa_at_the_residual_of_peer(SHAPE, "cpu", 128)
    assert 0 < errors["ours"] <= errors["theirs"]


@pytest.mark.parametrize(
    ("name", "peer", "expected"),
    [
        ("linear", "fla, plain", flops.linear_count(16)),
        ("gated_delta_net", "in-tree", flops.delta_count(16)),
        # The inverse is formed and multiplied, at twice the cost of solving with the triangle.
        ("gated_delta_net", "fla, plain", flops.delta_count(16) + flops.Count(4 * 64 * 16)),
        ("mesa_net", "fla, plain", flops.mesa_count(16, steps=31)),  # the first residual takes a product too
        # The reference form multiplies the rates by the biases' gradients apart.
        ("ttt_linear", "TTT reference", flops.ttt_count(16, 1) + flops.Count(2 * 16 * 16)),
        ("ttt_mlp", "TTT reference", flops.ttt_count(16, 2) + flops.Count(2 * 16 * (16 + 64))),
    ],
)
def test_arithmetic_is_what_the_plain_forms_execute(name, peer, expected):
    """Matrix products as PyTorch counts them, per token and head; it does not count triangular systems."""
    inputs = cases.make_inputs(OPERATORS[name].gates, 128, SHAPE)
    with FlopCounterMode(display=False) as counter:
        cases.make_pass(OPERATORS[name].peers[peer].function, inputs, backward=False)()
    assert counter.get_total_flops() == expected.products * 128 * SHAPE.heads


def test_sides_take_turns():
    calls = []
    sides = {name: lambda name=name: calls.append(name) for name in "ab"}
    timings = measure.interleave(sides, repeats=3)
    assert calls == list("abababab")  # one to warm up
    assert [timing.runs for timing in timings.values()] == [3, 3]
    assert measure.interleave(sides, repeats=9, seconds=0.0)["a"].runs == 3


def hold(megabytes: int, times: int) -> int:
    """Peak bytes of holding so many megabytes, `times` over one after the other."""

    def allocate() -> None:
        for _ in range(times):
            torch.ones(megabytes * MEGABYTE // 4)

    return measure.peak_bytes(allocate)


def test_peak_memory():
    """What is freed before the next is taken does not add up."""
    for megabytes, times in ((64, 1), (64, 3), (8, 1)):
        peak = measure.in_fresh_process(hold, megabytes, times)
        assert megabytes * MEGABYTE <= peak + MEGABYTE / 2
        assert peak <= (megabytes + 8) * MEGABYTE


def test_table():
    columns = Column("name", "name"), Column("value", "value", "{:.1f}")
    rows = [{"name": "a", "value": 1.25}, {"name": "b", "value": None}]
    assert table(columns, rows) == ["| name | value |", "|---|---:|", "| a | 1.2 |", "| b |  |", ""]


def write_report(folder, command: str, quick: bool, rows: list[dict]) -> None:
    report = Report(command, "", "", {"quick": quick}, {"date": "2026-01-01"}, rows, {})
    (folder / f"{command}.json").write_text(json.dumps(vars(report)))


def test_acceptance(tmp_path):
    """The worst of the rows decides; quick results and what is absent count as not measured."""
    write = partial(write_report, tmp_path)
    row = {"operator": "delta_net", "inputs": "fp32", "pass": "forward + backward", "tokens": 4096, "peer": "in-tree"}
    forward = {**row, "pass": "forward"}
    write("ops", False, [{**row, "ratio": 3.5}, {**forward, "ratio": 1.6}, {**forward, "tokens": 16384, "ratio": 1.4}])
    write("growth", True, [{"operator": "linear", "tokens": 65536, "time_growth": 1.0, "memory_growth": 1.0}])
    write("decode", False, [{"context": 65536, "growth": 1.05}, {"context": 65536, "growth": 1.2}])
    report = main(["acceptance", "--output", str(tmp_path)])
    rows = {row["requirement"]: (row["value"], row["reached"]) for row in report.rows}
    assert len(rows) == len(report.rows) == len(acceptance.requirements())
    op = "delta_net against the in-tree function, fp32, forward"
    assert rows[f"{op} + backward, 4,096 tokens"] == (3.5, "yes")
    assert rows[f"{op} + backward, 16,384 tokens"] == (None, "not measured")
    assert rows[f"{op} alone"] == (1.4, "no")
    assert rows["linear, time per token at 65,536 tokens relative to 2,048"] == (None, "not measured")
    assert rows["decode, all-recurrent models at context 65,536 relative to 1,024"] == (1.2, "no")


def test_acceptance_of_no_results_is_refused(tmp_path, capsys):
    """Nor do quick ones count, or a table that acceptance itself has written."""
    folder = tmp_path / "results"
    arguments = ["acceptance", "--output", str(folder)]
    assert f"argument --output: {folder} holds no results of a full measurement" in refused(arguments, capsys)
    assert not folder.exists()
    folder.mkdir()
    write_report(folder, "ops", True, [])
    write_report(folder, "acceptance", False, [])
    message = refused(arguments, capsys)
    for command in ("ops", "layers", "growth", "decode", "training"):
        assert f"python -m benchmarks {command} --output {folder}" in message
    assert sorted(path.name for path in folder.iterdir()) == ["acceptance.json", "ops.json"]


def test_quick_acceptance_reads_the_results_and_keeps_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    write_report(folder, "decode", False, [{"context": 65536, "growth": 1.05}])
    report = main(["acceptance", "--quick"])
    assert [row["value"] for row in report.rows if row["reached"] == "yes"] == [1.05]
    assert "# acceptance" in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == ["decode.json"]
    main(["acceptance"])
    assert sorted(path.name for path in folder.iterdir()) == ["acceptance.json", "acceptance.md", "decode.json"]
