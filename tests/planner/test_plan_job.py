"""jobs/plan.py from the command line: table, files, exit statuses."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch
from dhp_ray.schema import PLANNERS
from tests.checkout import job_of

JOB = Path(__file__).parents[2] / "jobs" / "plan.py"
job = job_of("plan")


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("num_tokens,name\n" + "".join(f"{tokens},x\n" for tokens in (20000, 300, 400, 9000, 70)))
    return path


def test_a_plan_is_printed_written_drawn_and_replayed(lengths, tmp_path, capsys):
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    assert job.main([f"lengths={lengths}", "num_ranks=4", f"out={out}", f"picture={picture}"]) == 0
    text = capsys.readouterr().out
    assert "predicted time:" in text
    assert "5 sequences, 29770 tokens, 4 ranks" in text
    tree = json.loads(out.read_text())
    assert {"planner", "sync", "num_ranks", "ranks_per_node", "tokens_per_rank", "predicted_time_s", "lower_bound_s",
            "planning_time_s", "groups"} <= set(tree)
    assert sorted(row for group in tree["groups"] for row in group["sequences"]) == [0, 1, 2, 3, 4]
    assert set(tree["groups"][0]) >= {"micro_batch", "ranks", "sequences", "predicted_time_s"}
    assert picture.read_bytes()[:4] == b"\x89PNG"
    again = tmp_path / "again.json"
    assert job.main([f"replay={out}", f"out={again}"]) == 0
    assert json.loads(again.read_text())["groups"] == tree["groups"]


@pytest.mark.parametrize(("encoder", "words"), [
    ("world", "4, apart from the packs: 1.0000 s before them, 2.0000 s after, activations kept"),
    ("recomputed", "4, apart from the packs: 1.0000 s before them, 3.0000 s after, activations computed again"),
    ("frozen", "4, apart from the packs: 3.0000 s before them, 0.0000 s after, activations kept"),
    ("group", "4, encoded in the packs"), ("", "")])
def test_where_images_are_encoded_is_printed(tmp_path, capsys, encoder, words):
    cost = CostModel(0.0, 1.0, 0.0, 0.0, {2: 1e9}, vision_linear_s=1.0,
                     vision_forward=1.0 if encoder == "frozen" else 1 / 3)
    if encoder == "recomputed":
        cost = replace(cost, memory_bytes_per_token=1.0, encoder_bytes_per_patch=8.0)  # of three patches 24, over 20
    grids = ((1, 1, 1), (1, 1, 1), (1, 1, 2), (1, 1, 2)) if encoder else ()
    samples = [Sample("a", 8, 4, grids[:2]), Sample("b", 8, 4, grids[2:])]
    plan = plan_batch(samples, ClusterSpec(2, 2, 20), cost, encoder="group" if encoder in ("", "group") else "world")
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    again = tmp_path / "again.json"
    assert job.main([f"replay={tmp_path / 'plan.json'}", f"out={again}", f"picture={tmp_path / 'plan.png'}"]) == 0
    text = capsys.readouterr().out
    assert [line.split(None, 1)[1] for line in text.splitlines() if line.startswith("images:")] == [words] * bool(words)
    before, after = (json.loads(path.read_text()) for path in (tmp_path / "plan.json", again))
    assert (after["groups"], after["vision"]) == (before["groups"], before["vision"])
    assert "idle:            0.0 % of rank time" in text


def test_nodes_of_unequal_size(lengths, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert job.main([f"lengths={lengths}", "nodes=2,3", f"out={out}"]) == 0
    tree = json.loads(out.read_text())
    assert (tree["num_ranks"], tree["ranks_per_node"], tree["inputs"]["nodes"]) == (5, 3, [0, 0, 1, 1, 1])
    assert job.main([f"lengths={lengths}", "nodes=2,3", "num_ranks=6"]) == 2
    assert job.main([f"lengths={lengths}", "nodes=2,0"]) == 2
    assert (
        capsys.readouterr().err
        == "error: num_ranks: got 6; nodes=2,3 has 5 ranks\nerror: nodes: got '0'; allowed: a whole number of at least "
           "1\n"
    )


@pytest.mark.parametrize("planner", ["dhp", pytest.param("dhp_paper", marks=pytest.mark.slow)])
def test_compiling_and_loading_compiled_code_are_not_planning_time(lengths, tmp_path, planner):
    """In a process of its own, where the first call compiles or loads: tenths of a second at least, for a plan of
    milliseconds.
    """
    out = tmp_path / "plan.json"
    text = subprocess.run([sys.executable, str(JOB), f"lengths={lengths}", "num_ranks=4", f"planner={planner}",
                           f"out={out}"], check=True, capture_output=True,
                          text=True).stdout
    [compile_s] = [float(line.split()[1]) for line in text.splitlines() if line.startswith("compiling:")]
    assert compile_s >= 0.1
    assert json.loads(out.read_text())["planning_time_s"] < 0.5 * compile_s


def test_fixed_costs_are_printed_and_are_not_idle(lengths, tmp_path, capsys):
    (tmp_path / "cost.yaml").write_text(
        "{quadratic_s: 0, linear_s: 1.0e-4, comm_bytes_per_token: 1, fixed_s: 7.5, bandwidth_bytes_per_s: 1.0e9}"
    )
    assert job.main([f"lengths={lengths}", "num_ranks=1", "tokens_per_rank=20000", "sync=micro_batch",
                     f"cost={tmp_path / 'cost.yaml'}"]) == 0
    text = capsys.readouterr().out
    assert "fixed costs:     15.0000 s of it on every rank, 2 x 7.5000 s" in text
    assert "idle:            0.0 % of rank time" in text


def test_help_names_every_planner():
    text = subprocess.run([sys.executable, str(JOB), "--help"], check=True, capture_output=True, text=True).stdout
    assert all(name in text for name in (*PLANNERS, *(f"{key}=" for key in job.DEFAULTS)))


@pytest.mark.parametrize(("words", "message"), [
    (["num_ranks=4"], "lengths: give lengths=FILE.csv or replay=FILE.json"), (["lengths={csv}"], "num_ranks: got ''"),
    (["lengths={csv}", "num_ranks=4", f"tokens_per_rank={2**62}"], f"tokens_per_rank: got {2**62}; allowed: at most "),
    (["lengths={csv}", f"num_ranks={10**21}"], f"num_ranks: got {10**21}; allowed: at most 100000"),
    (["lengths={csv}", "num_ranks=1000000000"], "num_ranks: got 1000000000; allowed: at most 100000"),
    (["lengths={csv}", "num_ranks=4", "ranks_per_node=100001"], "ranks_per_node: got 100001; allowed: at most 100000"),
    (["lengths={csv}", "nodes=" + ",".join(["100000"] * 20000)], "nodes: got 2000000000 ranks; allowed: at most "),
    (["replay={csv}", "num_ranks=4"], "num_ranks: got '4' with replay="),
    (["replay={csv}", "planner=dhp"], "planner: got 'dhp' with replay="),
    (["lengths=s3://KEY:secret@bucket/x.csv", "num_ranks=4"], "lengths: got s3://***@bucket/x.csv; allowed: a path of"),
    (["lengths={csv}", "num_ranks=4", "out=s3://bucket/x.json"], "out: got s3://bucket/x.json; allowed: a path of"),
    (["lengths={csv}", "num_ranks=four"], "num_ranks: got 'four'; allowed: a whole number of at least 1"),
    (["lengths={csv}", "num_ranks=4", "rank=1"], "rank=1: no such argument; allowed: lengths="),
    (["lengths={csv}", "num_ranks=4", "planner=best"], "planner: got 'best'; allowed: dhp"),
    (["lengths={csv}", "num_ranks=4", "speeds=1,x"], "speeds: got '1,x'"),
    (["lengths={csv}", "num_ranks=4", "speeds=1"], "1 speeds for 4 ranks"),
    (["lengths={csv}", "num_ranks=4", "speeds=1,1,0,1"], "rank 2 has speed 0.0; it must be from 1e-9 to 1e9"),
    (["lengths={csv}", "num_ranks=2"], "sample 0: 20000 tokens; the cluster holds at most 16384"),
    (["lengths=absent.csv", "num_ranks=2"], "absent.csv cannot be read"), (["replay={csv}"], "cannot be read"),
    (["lengths={csv}", "num_ranks=4", "cost=absent.yaml"], "absent.yaml: cannot be read")])
def test_bad_arguments_are_one_line_and_exit_2(words, message, lengths, capsys):
    assert job.main([word.format(csv=lengths) for word in words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("row", "message"), [
    ("", "line 4: num_tokens: got ''"), ("12.5", "line 3: num_tokens: got '12.5'"),
    ("0", "line 3: num_tokens: got '0'"), ("1,024", "line 3 has 3 cells; allowed: 2, as in its first line")])
def test_a_bad_row_is_named_by_its_line(tmp_path, capsys, row, message):
    path = tmp_path / "bad.csv"
    path.write_text(f"num_tokens,name\n7,a\n{row},b\n" if row else "num_tokens,name\n7,a\n8,b\n,c\n")
    assert job.main([f"lengths={path}", "num_ranks=1"]) == 2
    assert message in capsys.readouterr().err


def test_spaces_behind_commas_are_no_part_of_columns(tmp_path):
    (tmp_path / "spaced.csv").write_text("num_tokens, vision_tokens\n7, 5\n")
    [sample] = job.read_lengths(tmp_path / "spaced.csv")
    assert (sample.text_tokens, sample.vision_tokens) == (2, 5)


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path, capsys):
    (tmp_path / "marked.csv").write_text("num_tokens\n7\n", encoding="utf-8-sig")
    assert job.main([f"lengths={tmp_path / 'marked.csv'}", "num_ranks=1"]) == 0


@pytest.mark.parametrize("name", ["out", "picture"])
def test_what_cannot_be_written_is_said_before_the_work(lengths, tmp_path, capsys, monkeypatch, name):
    monkeypatch.setattr(job, "planned", None)
    (tmp_path / "folder.png").mkdir()
    for path, reason in ((tmp_path / "folder.png", "Is a directory"), (lengths / "x.png", "Not a directory")):
        assert job.main([f"lengths={lengths}", "num_ranks=4", f"{name}={path}"]) == 1
        assert capsys.readouterr().err == f"error: {name}: {path} cannot be written: {reason}\n"


@pytest.mark.parametrize("name", ["out", "picture"])
def test_a_disk_that_fills_is_told_of_the_file(lengths, tmp_path, capsys, name):
    (tmp_path / "full.png").symlink_to("/dev/full")
    assert job.main([f"lengths={lengths}", "num_ranks=4", f"{name}={tmp_path / 'full.png'}"]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == (
        "", f"error: {name}: {tmp_path / 'full.png'}: cannot be written: No space left on device\n")


@pytest.mark.parametrize("name", ["lengths", "replay", "cost"])
def test_what_is_read_is_not_written_over(lengths, tmp_path, capsys, name):
    words = {"lengths": [], "replay": [], "cost": [f"lengths={lengths}", "num_ranks=4"]}[name]
    kept = tmp_path / "kept"
    kept.write_text("mine")
    (tmp_path / "link").symlink_to(kept)
    assert job.main([*words, f"{name}={kept}", f"out={tmp_path / 'link'}"]) == 2
    assert capsys.readouterr().err == (
        f"error: out: got '{tmp_path / 'link'}', the file of {name}=; allowed: another file\n")
    assert kept.read_text() == "mine"


def test_what_is_read_by_default_is_not_written_over(lengths, tmp_path, capsys):
    before = job.DEFAULT_COST.read_text()
    assert job.main([f"lengths={lengths}", "num_ranks=4", f"out={job.DEFAULT_COST}"]) == 2
    assert job.DEFAULT_COST.read_text() == before
    assert capsys.readouterr().err == (
        f"error: out: got '{job.DEFAULT_COST}', the file of cost=; allowed: another file\n")


def test_a_plan_and_its_picture_are_two_files(lengths, tmp_path, capsys):
    (tmp_path / "link.png").symlink_to(tmp_path / "plan.png")
    words = [f"out={tmp_path / 'plan.png'}", f"picture={tmp_path / 'link.png'}"]
    assert job.main([f"lengths={lengths}", "num_ranks=4", *words]) == 2
    assert capsys.readouterr().err == (
        f"error: out: got '{tmp_path / 'plan.png'}', the file of picture=; allowed: another file\n")


def test_new_folders_are_made(lengths, tmp_path):
    plan, picture = tmp_path / "new" / "dir" / "plan.json", tmp_path / "other" / "plan.png"
    assert job.main([f"lengths={lengths}", "num_ranks=4", f"out={plan}", f"picture={picture}"]) == 0
    assert (plan.exists(), picture.exists()) == (True, True)


def test_homes_are_expanded(lengths, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert job.main(["lengths=~/lengths.csv", "num_ranks=4", "out=~/plan.json"]) == 0
    assert job.main(["replay=~/plan.json", "out=~/again.json"]) == 0
    assert (tmp_path / "again.json").exists()


def test_a_picture_of_an_unknown_kind_is_one_line(lengths, tmp_path, capsys):
    assert job.main([f"lengths={lengths}", "num_ranks=4", f"picture={tmp_path / 'plan.foo'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "foo" in error
    assert error.count("\n") == 1


def test_a_plan_file_that_is_nested_too_deeply_is_one_line(tmp_path, capsys):
    (tmp_path / "deep.json").write_text('{"a":' * 200_000)
    assert job.main([f"replay={tmp_path / 'deep.json'}"]) == 2
    assert capsys.readouterr().err.startswith(f"error: replay: {tmp_path / 'deep.json'} cannot be read: ")


def test_a_file_that_is_no_plan_is_named(tmp_path, capsys):
    for text in ("[]", "{}"):
        (tmp_path / "other.json").write_text(text)
        assert job.main([f"replay={tmp_path / 'other.json'}"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: replay: {tmp_path / 'other.json'}: plan file: no usable inputs (")


def test_a_file_without_the_column_is_refused(tmp_path, capsys):
    (tmp_path / "other.csv").write_text("length\n7\n")
    assert job.main([f"lengths={tmp_path / 'other.csv'}", "num_ranks=1"]) == 2
    assert "has columns length; a column num_tokens is needed" in capsys.readouterr().err


@pytest.mark.parametrize(("line", "message"), [
    ("linear_s: -1", "linear_s: got -1; allowed: a number of at least 0 and at most 1e+30"), ("", "linear_s: missing")])
def test_a_bad_cost_file_is_named(lengths, tmp_path, capsys, line, message):
    path = tmp_path / "cost.yaml"
    path.write_text(f"quadratic_s: 0.0\ncomm_bytes_per_token: 1\nfixed_s: 0\nbandwidth_bytes_per_s: 1\n{line}\n")
    assert job.main([f"lengths={lengths}", "num_ranks=4", f"cost={path}"]) == 2
    assert capsys.readouterr().err == f"error: {path}: {message}\n"
