"""What every transport raises: a type for each failure, so that no other module reads an error's text."""

import ast
import contextlib
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import microparallel as mp
from microparallel.transport import in_process_transports, nccl_rules_transports
from microparallel.transport.torch_distributed import TRANSLATED, _within, translate

SOURCE = Path(mp.__file__).parent


def waits_in_vain(comms):
    """Rank 1 waits for a message that rank 0 never sends; rank 0 stays until rank 1 has gone."""
    if comms.rank == 0:
        with contextlib.suppress(mp.errors.PeerGone):
            comms._group.irecv(torch.zeros(1), 1).wait()
        return None
    try:
        comms._group.irecv(torch.zeros(1), 0).wait(0.1)
    except mp.errors.TransportTimeout as error:
        return isinstance(error, TimeoutError), isinstance(error, RuntimeError)


def test_a_transfer_that_takes_too_long(any_pool):
    assert any_pool.run(waits_in_vain, 2, timeout=30)[1] == (True, True)


def is_left_alone(comms):
    """Rank 0 returns at once; rank 1 waits for a message from it."""
    if comms.rank == 0:
        return None
    try:
        comms._group.irecv(torch.zeros(1), 0).wait()
    except mp.errors.PeerGone as error:
        return error.ranks, isinstance(error, ConnectionError), str(error)


def test_a_peer_that_is_gone(any_pool):
    assert any_pool.run(is_left_alone, 2, timeout=30)[1] == ((0,), True, "rank 0 went away")


def test_what_torch_raises_in_a_store():
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    with pytest.raises(mp.errors.AddressInUse), TRANSLATED:
        dist.TCPStore("127.0.0.1", store.port, 1, is_master=True)
    with pytest.raises(mp.errors.TransportTimeout), TRANSLATED:
        store.wait(["no rank sets this"], timedelta(seconds=0.01))


def test_only_a_socket_of_the_store_has_an_address_that_may_be_in_use():
    said = "Address already in use"
    assert type(translate(dist.DistNetworkError(said))) is mp.errors.AddressInUse
    assert type(translate(dist.DistBackendError(f"NCCL error: {said}"))) is mp.errors.TransportError


def test_what_the_system_says_of_a_link_is_told_from_what_gloo_says_of_its_own_time():
    assert type(translate(RuntimeError("Read error [10.0.0.2]:4711: Connection timed out"))) is mp.errors.LinkLost
    assert type(translate(RuntimeError("Timed out waiting 6000ms for recv operation"))) is mp.errors.TransportTimeout
    assert type(translate(dist.DistNetworkError("Connection timed out"))) is mp.errors.TransportTimeout


def test_where_gloo_s_own_code_found_it_is_left_out():
    said = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/buffer.cc:78] Timed out waiting 4000ms for recv"
    assert str(translate(RuntimeError(said))) == "Timed out waiting 4000ms for recv"


def test_a_store_behind_the_same_link_is_not_waited_for():
    never = threading.Event()
    assert _within(0.01, lambda: never.wait(50) and b"") is None
    assert _within(50, lambda: b"[1]") == b"[1]"
    never.set()


@pytest.mark.parametrize("make_transports", [in_process_transports, nccl_rules_transports])
def test_in_one_process_no_other_rank_runs_while_one_waits(make_transports):
    with pytest.raises(mp.errors.TransportTimeout, match="rank 0"):
        make_transports(2)[0].irecv(torch.zeros(1), 1).wait()


# ── no module above the transports looks into an error's text ───────────────────────────────────────────────────────


def matches_on_text(tree):
    """The lines in which the text of a caught error decides: `"…" in str(error)`, `str(error) == …`, `re.search(…)`."""
    for handler in ast.walk(tree):
        if isinstance(handler, ast.ExceptHandler) and handler.name and not _has_a_key(handler):
            yield from _decisions(handler.body, {handler.name})
        if isinstance(handler, ast.FunctionDef):
            errors = {one.arg for one in handler.args.args if one.annotation and _is_error(ast.unparse(one.annotation))}
            if errors:
                yield from _decisions(handler.body, errors)


def _has_a_key(handler):
    """What a KeyError holds is the key, a value like any other."""
    return handler.type is not None and ast.unparse(handler.type) == "KeyError"


def _is_error(annotation):
    kinds = (name.rpartition(".")[2].strip() for name in annotation.split("|"))
    return any(name.endswith(("Error", "Exception", "Timeout", "TimedOut", "Failed", "Lost", "Gone")) for name in kinds)


def _decisions(body, errors):
    texts = set()  # names that hold an error's text

    def is_text(node):
        for part in ast.walk(node):
            match part:
                case ast.Call(func=ast.Name(id="str" | "repr"), args=[ast.Name(id=name)]) if name in errors:
                    return True
                case ast.Attribute(attr="args" | "reason" | "traceback", value=ast.Name(id=name)) if name in errors:
                    return True
                case ast.Name(id=name) if name in texts:
                    return True
        return False

    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, ast.Assign) and is_text(node.value):
            texts |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        by_value = (ast.In, ast.NotIn, ast.Eq, ast.NotEq)
        if isinstance(node, ast.Compare) and any(isinstance(sign, by_value) for sign in node.ops) and is_text(node):
            yield node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asks = node.func.attr in ("startswith", "endswith", "find", "index", "search", "match", "fullmatch")
            if asks and is_text(node):
                yield node.lineno


def test_the_search_finds_what_it_looks_for():
    for found in (
        'try: f()\nexcept RuntimeError as error:\n    if "timed out" in str(error).lower(): pass',
        'try: f()\nexcept Exception as e:\n    text = str(e)\n    if text.startswith("no"): pass',
        'try: f()\nexcept Exception as e:\n    found = re.search("gone", e.args[0])',
        'def explain(error: RuntimeError):\n    if str(error) == "gone": pass',
    ):
        assert list(matches_on_text(ast.parse(found))), found
    for fine in (
        "try: f()\nexcept Exception as e:\n    raise Wrong(str(e)) from e",
        "try: f()\nexcept OSError as e:\n    if isinstance(e, TimeoutError) and e.errno == 3: pass",
        "try: f()\nexcept KeyError as e:\n    if e.args[0] in range(3): pass",
    ):
        assert not list(matches_on_text(ast.parse(fine))), fine


def test_no_error_is_known_by_its_text_above_the_transports():
    """Where torch has one type for everything, it is translated right where torch raises it."""
    found = {
        f"{path.relative_to(SOURCE)}:{line}"
        for path in SOURCE.rglob("*.py")
        for line in matches_on_text(ast.parse(path.read_text()))
    }
    allowed = "transport/torch_distributed.py"
    assert any(place.startswith(allowed) for place in found)
    assert [place for place in sorted(found) if not place.startswith(allowed)] == []
