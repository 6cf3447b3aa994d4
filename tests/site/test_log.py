"""A site's log: what stands in it of a run, and that nobody changes it unnoticed."""

import csv
import io
import json
import os
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fedapp.commands.site import site_app
from fedapp.errors import ConfigError, DataError, PartyError, WaitingError
from fedapp.home import home
from fedapp.messages.pax import SketchRequest
from fedapp.runs.local import run_local
from fedapp.site import log, register
from fedapp.site.account import account_of
from fedapp.site.clock import SECONDS_A_DAY
from fedapp.site.log import HEAD, LOG, Audit, LogError, append, drop_old
from fedapp.site.store import Store
from strategies import flower
from tests.crypto.test_masks import GREETING, MODEL, TERMS, growing
from tests.federated import summary_of
from tests.plans import planned
from tests.site.office import approve, set_clock
from tests.site.test_plan import ask, begun

DAY = SECONDS_A_DAY


def site(name="bank"):
    return home() / "sites" / name


def audited():
    """Lines of the bank's log, and what is wrong with it."""
    audit = Audit.of_site(site())
    return [fields for _, fields in audit], audit.faults


def lines():
    every, faults = audited()
    assert not faults
    return every


def logged(name):
    return [line for _, line in Audit.of_site(site(name))]


@pytest.fixture
def at(monkeypatch):
    """``at(days)``: from here on it is so many days later, or earlier."""
    now = time.time()
    return lambda days: set_clock(monkeypatch, now + days * DAY)


def shown(tmp_path, *words):
    """What `fedapp site log` prints of the bank's log."""
    folder = tmp_path / "bank"
    folder.mkdir(exist_ok=True)
    (folder / "site.toml").write_text('name = "bank"\ndata = "rows.csv"\n')
    if not (folder / "home").is_symlink():
        (folder / "home").symlink_to(home())
    return CliRunner().invoke(site_app, ["log", "--site", str(folder), *words])


@pytest.mark.slow
def test_each_thing_that_happens_in_a_run_has_a_line_of_its_numbers(settings, three, monkeypatch):
    """A private run, which somebody approves at the bank once it waits there."""
    admit = register.admit

    def admits(config, run, *words):
        try:
            admit(config, run, *words)
        except WaitingError:
            assert approve(run, "--yes").exit_code == 0
            raise

    monkeypatch.setattr(register, "admit", admits)
    monkeypatch.setattr(flower, "APPROVAL_POLL", 0.0)
    private = {"privacy__epsilon": 1000.0, "privacy__delta": 1e-3, "start_deadline": 60.0}
    policy = {"least-parties": 3, "run-epsilon": 1000, "approve": "ask"}
    folder = run_local(
        settings(parties=3, pax__aggregation="secure", **private), three(bank=policy)
    )
    every = {line["event"]: line for line in lines()}
    assert {line["run"] for line in lines()} == {str(summary_of(folder)["model_id"])}
    assert [*every] == ["answered", "waits", "approved", "opened", "charged", "ended"]
    waits, approved, opened = every["waits"], every["approved"], every["opened"]
    assert (waits["reasons"], waits["method"]) == (["approve is ask in the node config"], "pax")
    assert [*waits["parties"]] == ["bank", "insurer", "shop"]
    assert approved["reasons"] == waits["reasons"]
    assert opened["digest"] == approved["digest"]
    assert (opened["rows"], opened["approved"], opened["method"]) == (40, True, "pax")
    assert opened["plan"]["epsilon"] == 1000.0
    assert (every["charged"]["epsilon"], every["ended"]["epsilon"]) == (1000.0, 1000.0)
    trees = [line for line in lines() if line.get("kind") == "train.private_trees"]
    assert len(trees) == 2
    for line in trees:
        assert (line["leaves"], line["masked"], line["epsilon"]) == ("noised", True, 1000.0)
        assert (line["rows"], line["letters_to"]) == (40, [])
        assert line["sent"] > line["fields"]["masked"][0] > 0
    for name in ("bank", "insurer", "shop"):
        (state,) = site(name).glob("*/state")
        times = account_of(Store.open(state.parent)).times
        answers = Counter(line["kind"] for line in logged(name) if line["event"] == "answered")
        assert {kind: answers[kind] for kind in times} == times


def test_no_answer_leaves_without_a_line_and_one_that_has_none_is_missed(configs):
    bank, write = configs["bank"], os.write
    sketch = SketchRequest(n_bins=8, **TERMS)

    def short(file, data):
        is_log = os.readlink(f"/proc/self/fd/{file}") == str(site() / LOG)
        return write(file, data[: len(data) // 2] if is_log else data)

    ask(bank, greeting("bank"), 1)
    before = lines()
    rule = "log of bank must take a line before an answer leaves, got: No space"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedapp.site.log.os.write", short)
        with pytest.raises(LogError, match=rule):
            ask(bank, sketch, 2)
    assert lines() == before
    assert Store.open(site() / MODEL).step == 1
    ask(bank, sketch, 2)
    with pytest.MonkeyPatch.context() as patch:  # an answer beside the log
        patch.setattr("fedapp.site.answer.append", lambda *_, **__: b"")
        ask(bank, growing(), 3)
    assert audited()[1] == [f"1 answers to train.pax_grow of {MODEL} have no line"]


def greeting(*names):
    return replace(GREETING, rounded=False, **planned((*names, "zoo"), aggregation="plain"))


def test_an_answer_that_is_sent_again_says_so(configs):
    for _ in range(3):
        ask(configs["bank"], greeting("bank"), 1)
    assert [line["event"] for line in lines()] == ["opened", "answered", "repeated", "repeated"]
    again = lines()[-1]
    assert (again["kind"], again["step"]) == ("query.hello", 1)
    assert again["sent"] == lines()[1]["sent"]


def test_what_is_refused_and_why_and_what_fails_and_no_word_of_why(settings, three, monkeypatch):
    with pytest.raises(PartyError, match="strategy must be one that the site allows"):
        run_local(settings(parties=3), three(bank={"allow": "bagging"}))
    (line,) = lines()
    assert (line["event"], line["error"]) == ("refused", "ConfigError")
    assert line["kind"] == "query.greet"
    assert "strategy must be one that the site allows (bagging), got pax" in line["reason"]

    def fails(*_):
        raise RuntimeError("a secret")

    monkeypatch.setattr("fedapp.site.answer._handled", fails)
    with pytest.raises(PartyError, match=r"RuntimeError in query\.greet"):
        run_local(settings(parties=3), three())
    _, line = lines()
    assert (line["event"], line["error"], line["kind"]) == ("failed", "RuntimeError", "query.greet")
    assert "secret" not in line["reason"]


def test_no_value_of_a_table_is_in_the_log(settings, sites, write_table):
    ids = [f"patient{number}" for number in range(40)]
    secret = {"id": ids, "y": [*([0, 1] * 19), "secret", 1]}
    broken = {"name": "bank", "data": write_table("bank", **secret), "id": "id"}
    well = {"name": "shop", "data": write_table("shop", id=ids), "id": "id"}
    with pytest.raises(PartyError):
        run_local(settings(parties=2, objective="reg:squarederror"), sites(broken, well))
    text = (site() / LOG).read_text()
    assert '"event": "refused"' in text
    for value in ("secret", "patient"):
        assert value not in text


def test_a_simulated_party_has_no_log(settings):
    run_local(settings(parties=2, num_boost_round=1))
    assert not [*home().rglob(LOG), *home().rglob(HEAD)]


def test_a_disk_that_fails_breaks_no_chain():
    write = os.write
    append(site(), "score", n=1)

    def fails(*_):
        raise OSError("input/output error")

    def half(file, data):
        return write(file, data[:9])

    for name, broken in {"write": half, "fdatasync": fails, "pwrite": fails}.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fedapp.site.log.os.ftruncate", fails)
            patch.setattr(f"fedapp.site.log.os.{name}", broken)
            with pytest.raises(LogError, match="log of bank must take a line before an answer"):
                append(site(), "score", n=2)
        append(site(), "score", n=3)
        assert lines()[-1]["n"] == 3


def test_lines_that_are_written_at_once_are_one_chain():
    with ThreadPoolExecutor(4) as pool:
        wait = [pool.submit(append, site(), "score", n=number) for number in range(40)]
    assert not any(each.exception() for each in wait)
    assert [line["number"] for line in lines()] == [*range(1, 41)]
    assert {line["n"] for line in lines()} == {*range(40)}


def test_a_site_that_dies_after_the_line_has_answered_nothing_but_said_so(configs, monkeypatch):
    bank = begun(configs["bank"], aggregation="plain")

    def dies(*words, **fields):
        append(*words, **fields)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedapp.site.answer.append", dies)
        with pytest.raises(KeyboardInterrupt):
            ask(bank, growing(), 3)
    assert Store.open(site() / MODEL).step == 2
    assert lines()[-1]["kind"] == "train.pax_grow"
    ask(bank, growing(), 3)
    assert [line.get("step") for line in lines()] == [None, 1, 2, 3, 3]


def test_half_a_line_goes_and_a_lost_head_is_written_anew(caplog):
    for number in range(3):
        append(site(), "score", n=number)
    with (site() / LOG).open("ab") as file:
        file.write(b'{"number": 4, "bef')
    assert len(lines()) == 3
    append(site(), "score", n=3)
    assert [line["n"] for line in lines()] == [0, 1, 2, 3]
    (site() / HEAD).unlink()
    assert audited()[1] == ["log.head was lost"]
    append(site(), "score", n=4)
    assert [line["n"] for line in lines()] == [0, 1, 2, 3, 4]
    assert "log.jsonl or log.head of bank was changed" in caplog.text
    for broken in ('["x", 1, 2]', "[]", "{}", "1"):
        (site() / HEAD).write_text(broken)
        append(site(), "score", n=5)
        assert lines()[-1]["n"] == 5


@pytest.fixture
def whole():
    """The lines of a log of some events, with a signed line in the middle."""
    for number in range(4):
        append(site(), "answered", run=MODEL, kind="train.pax_grow", n=number)
    append(site(), "ended", run=MODEL, questions=4)
    for number in range(4):
        append(site(), "score", rows=[[number, number]])
    return (site() / LOG).read_bytes().splitlines(keepends=True)


def faults_of(content):
    (site() / LOG).write_bytes(content)
    return audited()[1]


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_any_altered_byte_and_any_truncation_is_found_and_named(whole, stride):
    content = b"".join(whole)
    assert not faults_of(content)
    for place in range(0, len(content), stride):
        line = content[:place].count(b"\n") + 1
        named = {f"line {line} ", f"lines {line} ", f"line {line + 1} ", f"to {line} ", f"{line}"}
        for byte in {content[place] ^ 1, place % 256} - {content[place]}:
            faults = faults_of(content[:place] + bytes([byte]) + content[place + 1 :])
            assert any(name in fault for fault in faults for name in named), (place, byte)
        cut = f"lines {line} to {len(whole)} are cut off (log.head)"
        assert faults_of(content[:place]) == [cut], place


def test_any_removed_moved_or_doubled_line_is_found_and_named(whole):
    numbers = range(len(whole))
    for place in numbers:
        faults = faults_of(b"".join(whole[:place] + whole[place + 1 :]))
        assert faults[0].startswith(f"lines {place + 1} to {place + 1} "), faults
        assert any(word in faults[0] for word in ("removed", "missing", "cut off"))
        faults = faults_of(b"".join(whole[: place + 1] + whole[place:]))
        assert f"line {place + 1} is there twice, or was moved" in faults
        for other in numbers[place + 1 :]:
            swapped = whole.copy()
            swapped[place], swapped[other] = whole[other], whole[place]
            faults = " ".join(faults_of(b"".join(swapped)))
            assert "moved" in faults or "missing" in faults
    faults = faults_of(b"".join([*whole[:2], b'{"number": 9}\n', *whole[2:]]))
    assert faults == ["line 3 was altered"]


def test_a_chain_that_was_computed_anew_lacks_the_signature(whole, tmp_path):
    """Who can write the file, but has no key."""
    before, forged = log.FIRST, []
    for line in whole:
        fields = {**json.loads(line), "before": before}
        fields |= {"kind": "query.hello"} if fields["number"] == 2 else {}
        forged.append(json.dumps(fields).encode() + b"\n")
        before = log.line_digest(forged[-1])
    end = len(b"".join(forged))
    (site() / HEAD).write_text(json.dumps([len(whole), before, end]))
    assert faults_of(b"".join(forged)) == ["the signature of line 5 is wrong"]
    unsigned = [line for line in forged if b"signature" not in line]
    assert faults_of(b"".join(unsigned[:4]))


@pytest.mark.parametrize(
    ("kept", "fault"), [(-70, "line 6 was altered"), (0, "lines 1 to 6 are missing")]
)
def test_the_next_line_shows_what_was_lost(configs, kept, fault, caplog):
    ask(configs["bank"], greeting("bank"), 1)
    for number in range(4):
        append(site(), "score", n=number)
    (site() / LOG).write_bytes((site() / LOG).read_bytes()[:kept])
    append(site(), "score", n=9)
    assert audited()[1] == [fault]
    assert "log.jsonl or log.head of bank was changed" in caplog.text


def test_a_new_key_is_signed_by_the_one_before(whole):
    with register.transaction(site()):
        pass
    register.renew_identity(site())
    append(site(), "signed")
    assert [line["event"] for line in lines()][-2:] == ["rekeyed", "signed"]
    (site() / "identity.key").write_bytes(bytes(range(32)))  # another's
    _, faults = audited()
    assert faults == ["the key of the signatures is not the site's"]
    append(site(), "signed")
    _, faults = audited()
    assert "line 12 is signed by another key" in faults


def test_old_lines_go_and_a_signed_line_says_so(at):
    for age in (9.0, 8.0, 7.5, 3.0, 1.0):
        at(-age)
        append(site(), "score", age=age)
    at(0)
    for days in (0, 30):
        drop_old(site(), days)
        assert len(lines()) == 5
    drop_old(site(), 2)
    three, one, dropped = lines()
    assert (three["age"], one["age"], dropped["event"]) == (3.0, 1.0, "dropped")
    assert (dropped["last"], dropped["days"], three["number"]) == (3, 2, 4)
    append(site(), "score", age=0)
    drop_old(site(), 2)  # not again before a day has passed
    assert [line["number"] for line in lines()] == [4, 5, 6, 7]
    at(9)
    drop_old(site(), 2)
    (last,) = lines()
    assert (last["event"], last["last"], last["number"]) == ("dropped", 7, 8)


def test_a_site_keeps_its_lines_for_the_days_of_its_node_config(configs, at):
    at(-9)
    append(site(), "score")
    at(0)
    ask(replace(configs["bank"], log_days=3), greeting("bank"), 1)
    assert [line["event"] for line in lines()] == ["opened", "dropped", "answered"]


@pytest.fixture
def closed(monkeypatch, at):
    """Files of two lines, 8, 6, 4 and 2 days old, which get no more; the last one is empty."""
    monkeypatch.setattr("fedapp.site.log.CLOSED_BYTES", 180)
    for age in (8, 8, 6, 6, 4, 4, 2, 2):
        at(-age)
        append(site(), "score", age=age)
    at(0)
    *files, last = log.parts(site() / LOG)
    assert [path.name[-8:] for path in files] == [f"{n}.jsonl" for n in ("02", "04", "06", "08")]
    assert not last.stat().st_size
    return files


def test_a_log_of_several_files_is_one_chain(closed, tmp_path):
    append(site(), "score")
    assert [line["number"] for line in lines()] == [*range(1, 10)]
    assert shown(tmp_path).exit_code == 0
    content = closed[1].read_bytes()
    closed[1].write_bytes(content.replace(b'"age": 6', b'"age": 7'))
    assert audited()[1] == ["line 3 was altered, or what line 4 says of it"]
    closed[1].unlink()
    assert audited()[1] == ["lines 3 to 4 were removed"]
    closed[0].unlink()
    assert audited()[1] == ["lines 1 to 4 are missing"]


@pytest.mark.parametrize("loss", ["head", "before the head", "before the file"])
def test_the_chain_goes_on_after_a_file_was_closed(closed, caplog, loss):
    if loss == "head":
        (site() / HEAD).unlink()
    else:  # a process died
        *_, last = closed[-1].read_bytes().splitlines(keepends=True)
        head = json.dumps((8, log.line_digest(last), closed[-1].stat().st_size))
        (site() / HEAD).write_text(head)
        if loss == "before the file":
            (site() / LOG).unlink()
    append(site(), "score")
    assert [line["number"] for line in lines()] == [*range(1, 10)]
    assert "was changed" not in caplog.text


def test_old_files_go_as_a_whole_and_the_chain_stays(closed):
    drop_old(site(), 2)
    assert [path.exists() for path in closed] == [False, False, True, True]
    assert [line["number"] for line in lines()] == [5, 6, 7, 8, 9, 10]
    assert [line.get("last") for line in lines()[4:]] == [2, 4]
    append(site(), "score")
    assert lines()[-1]["number"] == 11
    closed[2].unlink()
    assert audited()[1] == ["lines 1 to 6 are missing"]


def test_the_young_lines_of_a_closed_file_stay(monkeypatch, at):
    monkeypatch.setattr("fedapp.site.log.CLOSED_BYTES", 180)
    for age in (8, 3, 2):
        at(-age)
        append(site(), "score", age=age)
    at(0)
    drop_old(site(), 2)
    assert [line.get("age", line["event"]) for line in lines()] == [3, 2, "dropped"]


def test_a_start_with_a_wrong_clock_drops_no_line_and_says_so(monkeypatch, caplog):
    """A year ahead or behind, in a start of the machine that has run or is new."""
    true = time.time()
    for day in range(-40, 0, 5):
        set_clock(monkeypatch, true + day * DAY)
        append(site(), "score", day=day)
    wrong = [(year * 365 * DAY, boot) for year in (1, -1) for boot in ("one", "two", "one")]
    for hour, (off, boot) in enumerate(wrong):
        set_clock(monkeypatch, true + hour * 3600 + off, true + hour * 3600, boot)
        for _ in range(2):
            append(site(), "score", wrong=off)
            drop_old(site(), 41)
    assert len(lines()) == 20
    faults = [each for each in caplog.messages if each.startswith("clock must be at 20")]
    assert faults
    assert all("only the time that the machine runs counts" in each for each in faults)
    assert all(abs(line["time"] - true) < 4 * DAY and line["clock"] for line in lines()[8:])
    for day in range(1, 50):
        set_clock(monkeypatch, true + day * DAY)
        drop_old(site(), 41)
        written = [line.get("day", 0) for line in lines() if line["event"] == "score"]
        assert len(written) >= 12 * (day < 41) + sum(day - other < 41 for other in range(-40, 0, 5))
    assert not written


def test_a_head_that_is_older_than_the_log_is_not_taken_for_checked(used, tmp_path, at):
    head = tmp_path / "head.json"
    at(0)
    head.write_text(shown(tmp_path, "--sign").output)
    at(9)
    drop_old(site(), 5)
    assert shown(tmp_path).exit_code == 0
    error = shown(tmp_path, "--head", str(head)).exception
    assert str(error) == "head must be of a line that is there, from 7 on, got an older one"


@pytest.fixture
def used(configs):
    """The bank has answered twice, refused once, and a run has ended."""
    ask(configs["bank"], greeting("bank"), 1)
    append(site(), "refused", run="", kind="=cmd()", error="ConfigError", reason="=1+1", sent=0)
    ask(configs["bank"], greeting("bank"), 1)
    register.record_ended("bank", MODEL, 0)


def test_the_command_shows_filters_and_says_by_whom_it_is_signed(used, tmp_path):
    result = shown(tmp_path)
    *every, end = result.output.splitlines()
    assert len(every) == 5
    assert "signature" not in result.output
    assert end.startswith("5 lines, each as it was written, signed to line 5 by ")
    filters = {
        "--event refused,ended": lambda line: line["event"] in ("refused", "ended"),
        f"--run {MODEL}": lambda line: line["run"] == MODEL,
        "--since 2999-01-01": lambda line: False,
        "--last 2": lambda line: line["number"] > 3,
    }
    for words, fits in filters.items():
        output = shown(tmp_path, *words.split()).output.splitlines()
        numbers = [json.loads(line)["number"] for line in output[:-1]]
        assert numbers == [line["number"] for line in lines() if fits(line)]
    document = json.loads(shown(tmp_path, "--json").output)
    assert (document["lines"], document["signed"], document["faults"]) == (5, 5, [])


def test_the_command_exports(used, tmp_path):
    plain = shown(tmp_path, "--export", "jsonl").output
    assert plain.encode() == (site() / LOG).read_bytes()
    table = [*csv.DictReader(io.StringIO(shown(tmp_path, "--export", "csv").output))]
    assert [row["event"] for row in table] == [line["event"] for line in lines()]
    assert [row["run"] for row in table] == [line["run"] for line in lines()]
    assert [json.loads(row["line"]) for row in table] == lines()
    form = r"<(\d+)>1 (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) bank fedapp - (\w+) - ({.*})"
    messages = shown(tmp_path, "--export", "syslog").output.splitlines()
    parts = [re.fullmatch(form, message) for message in messages]
    assert [part[3] for part in parts if part] == [line["event"] for line in lines()]
    assert [part[1] for part in parts if part] == ["110", "110", "108", "110", "110"]


def test_an_export_is_checked_elsewhere_and_a_head_binds_the_site(used, tmp_path, monkeypatch):
    head, copy = tmp_path / "head.json", tmp_path / "bank.jsonl"
    head.write_text(shown(tmp_path, "--sign").output)
    copy.write_bytes((site() / LOG).read_bytes())
    elsewhere = CliRunner().invoke(site_app, ["log", str(copy), "--head", str(head)])
    assert elsewhere.exit_code == 0
    append(site(), "score")
    assert shown(tmp_path, "--head", str(head)).exit_code == 0
    # The site computes the whole log anew, with its key.
    for path in (site() / LOG, site() / HEAD):
        path.unlink()
    for _ in range(9):
        append(site(), "score")
    with register.transaction(site()) as database:
        database.execute("DELETE FROM meta WHERE name = 'log'")
    assert shown(tmp_path).exit_code == 0
    error = shown(tmp_path, "--head", str(head)).exception
    assert isinstance(error, DataError)
    assert str(error).endswith(f"line 6 is not the one in {head}")
    head.write_text(head.read_text().replace("signed", "signet"))
    error = shown(tmp_path, "--head", str(head)).exception
    assert str(error).startswith("head must be a signed line of a log, got another file: ")


def test_a_log_that_was_deleted_is_missed_by_the_register(used, tmp_path):
    for path in (site() / LOG, site() / HEAD):
        path.unlink()
    append(site(), "score")
    error = shown(tmp_path).exception
    assert str(error).endswith("got: lines 2 to 5 are cut off (register.db)")


def test_the_command_refuses_what_it_does_not_know(tmp_path):
    for words in ("--export xml", "--since soon"):
        assert shown(tmp_path, *words.split()).exit_code == 2
    error = shown(tmp_path).exception
    assert isinstance(error, ConfigError)
    assert str(error).endswith("must be the log of bank, got none")
    (tmp_path / "site.toml").write_text('data = "rows.csv"\n')
    error = CliRunner().invoke(site_app, ["log", "--site", str(tmp_path)]).exception
    assert str(error).startswith("name in the node config must be ")
