# ruff: noqa: S104
"""`backbone invite`: a string that parses, a code where somebody can scan it, and the list of who came."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path

import pytest
from zmq.utils import z85

from backbone import listening
from backbone.cli import main
from backbone.commands import invite as command
from backbone.durations import parse_duration, show_duration
from backbone.errors import UsageError
from backbone.invite_book import InviteBook
from backbone.listening import Address, parse_address, reachable_hosts
from protocol.invite import parse_invite

Capture = pytest.CaptureFixture[str]


def test_it_prints_a_string_that_lets_one_worker_in_for_an_hour(capsys: Capture) -> None:
    before = int(time.time())
    assert main(["invite", "--listen", "10.0.0.7:99"]) == 0
    out, err = capsys.readouterr()
    invite = parse_invite(out)
    assert (invite.hosts, invite.port) == (("10.0.0.7",), 99)
    assert 3600 <= invite.expires - before <= 3660
    book = InviteBook()
    assert invite.server_key == book.server_keys()[0]
    (entry,) = book.invites.invites.values()
    assert (entry.uses, entry.expires) == (1, invite.expires)
    assert entry.key == z85.decode(command.zmq.curve_public(z85.encode(invite.secret_key)))
    assert err == "for one worker, within 1h: worker join STRING\n"
    for path in book.folder.iterdir():
        assert invite.secret_key.hex() not in path.read_text()


def test_loopback_is_warned_of_in_one_line(capsys: Capture) -> None:
    warning = "only this machine can join: the address 127.0.0.1:7610 is loopback; --listen HOST:PORT names another"
    assert main(["invite"]) == 0
    assert capsys.readouterr().err.splitlines()[1:] == [warning]
    assert main(["invite", "--listen", "0.0.0.0:7610", "--advertise", "box.lan"]) == 0
    out, err = capsys.readouterr()
    assert parse_invite(out).hosts == ("box.lan",)
    assert len(err.splitlines()) == 1


def test_a_file_is_its_owners_alone_and_is_not_written_over(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "fleet"
    wanted = ["invite", "--uses", "20", "--expires", "7d", "--listen", "10.0.0.7:99", "--out", str(path)]
    assert main(wanted) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"for 20 workers, within 7d: worker join --from {path}\n"
    assert path.stat().st_mode & 0o777 == 0o600
    parse_invite(text := path.read_text())
    assert main(wanted) == 2
    assert "is there already" in capsys.readouterr().err
    assert path.read_text() == text


def test_for_a_service_a_file_that_is_there_is_enough(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "fleet"
    wanted = ["invite", "--if-missing", "--listen", "10.0.0.7:99", "--out", str(path)]
    assert main(wanted) == 0
    text = path.read_text()
    capsys.readouterr()
    assert main(wanted) == 0
    assert capsys.readouterr() == ("", f"{path} is there: no invite was made\n")
    assert path.read_text() == text
    assert len(InviteBook().invites.invites) == 1
    assert main(["invite", "--if-missing"]) == 2
    assert "--if-missing goes with --out FILE" in capsys.readouterr().err


def test_the_settings_name_the_address_too(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTSWARM_LISTEN", "[fd00::1]:5")
    assert main(["invite"]) == 0
    assert parse_invite(capsys.readouterr().out).hosts == ("fd00::1",)
    monkeypatch.setenv("EXPERTSWARM_LISTEN", "fd00::1:5")
    assert main(["invite"]) == 2
    assert "listen (environment): 'fd00::1:5' is not HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--uses", "0"], "--uses: '0' is not a number from 1 to 10000"),
        (["--uses", "many"], "--uses: 'many' is not"),
        (["--expires", "0h"], "--expires: '0h' is not a time such as"),
        (["--expires", "400d"], "at most a year"),
        (["--listen", "x"], "'x' is not HOST:PORT"),
        (["--advertise", "a:1"], "--advertise: 'a:1' is neither an address nor a host name; give no port"),
        (["revoke", "nobody"], "no invite and no worker is 'nobody'"),
    ],
)
def test_wrong_use_ends_in_one_line_and_leaves_no_invite(args: list[str], told: str, capsys: Capture) -> None:
    assert main(["invite", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert len(err.splitlines()) == 1
    assert not InviteBook().invites.invites


def test_listing_and_revoking(capsys: Capture) -> None:
    assert main(["invite", "list"]) == 0
    assert "no invites and no workers" in capsys.readouterr().out
    main(["invite", "--uses", "2"])
    main(["invite"])
    book, now = InviteBook(), int(time.time())
    fleet, single = book.invites.invites
    with book.changing() as invites:
        invites.enrol(fleet, b"\x11" * 32, "phone", now)
        invites.enrol(fleet, b"\x22" * 32, "box", now)
        invites.enrol(single, b"\x33" * 32, "gpu", now)
    capsys.readouterr()
    assert main(["invite", "revoke", "phone"]) == 0
    assert main(["invite", "revoke", single.hex()[:12]]) == 0
    err = capsys.readouterr().err.splitlines()
    assert err == [
        "revoked worker phone (111111111111)",
        f"revoked invite {single.hex()[:12]}",
        "workers that enrolled with it stay: gpu; revoke them by name",
    ]
    assert main(["invite", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(i["key"], i["state"], i["used"], i["uses"]) for i in found["invites"]] == [
        (fleet.hex(), "used up", 2, 2),
        (single.hex(), "revoked", 1, 1),
    ]
    assert [(w["name"], w["state"]) for w in found["workers"]] == [
        ("phone", "revoked"),
        ("box", "enrolled"),
        ("gpu", "enrolled"),
    ]
    assert main(["invite", "list"]) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[1].split() == [fleet.hex()[:12], "2", "of", "2", "used", "up", "-"]
    assert text[5].split() == ["phone", "1" * 12, fleet.hex()[:12], "revoked"]
    assert InviteBook().invites.admitted_keys(now) == {b"\x22" * 32, b"\x33" * 32}


def test_who_is_meant_has_to_be_clear(capsys: Capture) -> None:
    main(["invite", "--uses", "2"])
    book = InviteBook()
    with book.changing() as invites:
        for number, name in ((1, "a"), (2, "b")):
            invites.enrol(next(iter(invites.invites)), b"\xee\xee" + bytes([number]) * 30, name, int(time.time()))
    capsys.readouterr()
    assert main(["invite", "revoke", "eeee"]) == 2
    assert "'eeee' could be worker a (eeee01010101), worker b (eeee02020202); give more" in capsys.readouterr().err
    assert not any(worker.is_revoked for worker in InviteBook().invites.workers.values())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_code_and_a_pipe_none() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        command.show_code("swarm1:" + "A" * 120, stream)
    assert len(terminal.getvalue().splitlines()) > 20
    assert pipe.getvalue() == ""


# ---- addresses and durations


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("box:1", "box", 1), ("[::]:65535", "::", 65535), ("*:80", "0.0.0.0", 80), (" 10.0.0.1:9 ", "10.0.0.1", 9)],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text, "x") == Address(host, port)


@pytest.mark.parametrize("text", ["", "box", "box:", ":1", "box:0", "box:65536", "::1:5", "[box]:1", "a b:1", "[::1:5"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="x: .* is not HOST:PORT"):
        parse_address(text, "x")


def test_all_addresses_stand_for_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_own_addresses", lambda: ["10.0.0.7", "fd00::7"])
    assert reachable_hosts(Address("0.0.0.0", 1), "") == ("10.0.0.7",)
    assert reachable_hosts(Address("::", 1), "") == ("10.0.0.7", "fd00::7")
    assert reachable_hosts(Address("::", 1), "[fd00::9]") == ("fd00::9",)
    monkeypatch.setattr(listening, "_own_addresses", list)
    with pytest.raises(UsageError, match="name it with --advertise HOST"):
        reachable_hosts(Address("0.0.0.0", 1), "")


def test_loopback() -> None:
    found = [Address(host, 1).is_loopback for host in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "0.0.0.0", "box")]
    assert found == [True, True, True, False, False, False]


def test_durations() -> None:
    assert [parse_duration(text) for text in ("90s", "30m", " 1H ", "7d", "366d")] == [90, 1800, 3600, 604800, 31622400]
    for wrong in ("1", "h", "0s", "-1h", "1.5h", "367d", "²h"):
        with pytest.raises(ValueError, match=re.escape(wrong)):
            parse_duration(wrong)
    shown = [show_duration(seconds) for seconds in (1, 60, 61, 119, 3600, 3601, 7199, 7201, 86400, 7 * 86400 - 1)]
    assert shown == ["1s", "1m", "61s", "119s", "1h", "61m", "120m", "3h", "1d", "7d"]
