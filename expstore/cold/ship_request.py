"""Ask the process that writes to a store to ship it: both sides of `expstore ship`.

Only the writer knows what has changed in a store. The command leaves the address of a socket in the store's
folder; the writer, which looks there with each of its heartbeats, connects, is told where to ship, and
answers once everything is shipped. Where to ship is told through the socket, which connects processes of one
user only: a file that another user puts there makes the writer upload nothing.
"""

from __future__ import annotations

import contextlib
import json
import select
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expstore.buffers.writing_messages import error_of, pack_error
from expstore.cold.ship_settings import Ship
from expstore.disk.files import Disk
from expstore.disk.message_socket import Listener, connect
from expstore.errors import ExpStoreError, LockedError, RemoteError, StateError
from expstore.storages.format.paths import SHIP_REQUEST
from expstore.storages.read_view import build_closed_error

if TYPE_CHECKING:
    from expstore.cold.ship import Shipper
    from expstore.storages.engine.store import Store

#: How long the command waits until the writer connects, seconds. A writer looks four times a second, or after
#: a sync.
CONNECT_SECONDS = 15.0
#: How long it waits until everything is shipped, seconds.
SHIP_SECONDS = 86_400.0
#: Longest message, bytes.
_MOST = 1 << 17


def ask_writer(path: Path, url: str) -> dict[str, Any]:
    """Make the process that has a store open ship it, until it closes the store.

    Threads: any. Crashes: a writer ignores and deletes the request of a command that has died.

    Args:
        path: The folder of the store.
        url: Where to ship it. The writer uses the credentials of its own environment.

    Returns:
        What is shipped: the fields of `rb.stats()["shipped"]`.

    Raises:
        LockedError: The writer does not answer.
        RemoteError: The writer has ended; or the server of the object storage does not answer.
        StateError: The writer already ships the store to another address, or the address has another store.
    """
    Ship(url)  # is it a URL?
    listener, disk, request = Listener(), Disk(), path / SHIP_REQUEST
    sock = None
    try:
        disk.write_whole(request, listener.address.encode())
        if select.select([listener.descriptor], [], [], CONNECT_SECONDS)[0]:
            sock = listener.accept()
        if sock is None:
            raise LockedError(
                f"the process that has {path} open did not answer within {CONNECT_SECONDS:g} seconds",
                hint="it hangs, or belongs to another user or container: open the store there with "
                "expstore.open(path, ship=...)",
            )
        sock.send(url.encode())
        answer = sock.receive(_MOST)
    finally:
        listener.close()
        if disk.exists(request):
            disk.unlink(request)
        if sock is not None:
            sock.close()
    if not answer:
        raise RemoteError(
            f"the process that had {path} open has ended",
            kind="owner_gone",
            hint="call the command again: it ships a store that no process has open",
        )
    told: dict[str, Any] = json.loads(answer)
    if "error" in told:
        raise error_of(answer)
    return told


class ShipRequests:
    """Take the requests that commands leave in the folder of a store that is open for writing.

    Threads: `take` is called by one thread at a time; each request is answered by a thread of its own.
    """

    def __init__(self) -> None:
        self._starting = threading.Lock()

    def take(self, storage: Store) -> None:
        """Take a request if there is one."""
        path = storage.path / SHIP_REQUEST
        if storage.disk.exists(path):
            address = storage.disk.read_whole(path).decode(errors="replace")
            storage.disk.unlink(path)
            threading.Thread(
                target=self._answer,
                args=(weakref.ref(storage), address),
                name="expstore-ship-request",
                daemon=True,
            ).start()

    def _answer(self, storage: weakref.ref[Store], address: str) -> None:
        try:
            sock = connect(address)
        except (ExpStoreError, OSError, ValueError):  # the command has ended, or another user has asked
            return
        try:
            message = pack_error(StateError("the command sent no address"))
            with contextlib.suppress(OSError, UnicodeDecodeError):
                message = self._ship(storage, sock.receive(_MOST).decode())
            with contextlib.suppress(OSError):  # the command was interrupted: the store is shipped
                sock.send(message)
        finally:
            sock.close()

    def _ship(self, storage: weakref.ref[Store], url: str) -> bytes:
        try:
            with self._starting:
                shipper = _start(storage(), url)
            shipper.wait(SHIP_SECONDS)  # the store may be closed or dropped meanwhile
            return json.dumps(shipper.stats()).encode()
        except Exception as exc:
            return pack_error(exc)


def _start(storage: Store | None, url: str) -> Shipper:
    """Return what ships a store to an address; start it if the store is not shipped yet."""
    from expstore.cold.ship import Shipper  # loads obstore

    if storage is None:
        raise build_closed_error()
    shipper = storage.holders.shipping
    if shipper is None:
        shipper = Shipper(Ship(url))
        shipper.start(storage)
    elif not (isinstance(shipper, Shipper) and shipper.ships_to(url)):
        raise StateError(
            f"{storage.path} is already shipped to {shipper.stats()['url']}",
            hint="a store has one address: close it, and open it with another ship=",
        )
    return shipper
