"""The sockets on which one server listens: for its clients, for its metrics, and for HTTP.

Owns their life, from the bind to the close, and their names for the user of the server.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from datastreamer.http.options import HttpOptions
from datastreamer.transport.listeners import Hosts, metrics_listeners, name_of, open_listeners


@dataclass
class Ports:
    """Listening sockets; those in `web` answer HTTP with the options `http`."""

    http: HttpOptions | None
    clients: list[socket.socket]
    metrics: list[socket.socket]
    web: list[socket.socket]

    @classmethod
    def open(
        cls,
        clients: Callable[[], Iterable[socket.socket]],
        metrics: tuple[Hosts, int] | None = None,
        http: HttpOptions | None = None,
    ) -> Ports:
        """The sockets for clients that `clients` returns, and new ones for the metrics and for
        HTTP. Raises `ListenFailed`, and `UsageError` for a file without tokens; then all sockets
        are closed."""
        ports = cls(http, [], [], [])
        try:
            if metrics is not None:
                ports.metrics = metrics_listeners(*metrics)
            if http is not None:
                http.check()
                ports.web = open_listeners(http.host, http.port)
            ports.clients = list(clients())
        except BaseException:
            ports.close()
            raise
        return ports

    @property
    def sockets(self) -> list[socket.socket]:
        return [*self.clients, *self.metrics, *self.web]

    @property
    def http_clients(self) -> int:
        """Maximum number of connections to the HTTP port."""
        return 0 if self.http is None else self.http.max_clients

    def copies(self) -> Ports:
        """Other descriptors of the same sockets."""
        lists = (self.clients, self.metrics, self.web)
        return Ports(self.http, *([each.dup() for each in sockets] for sockets in lists))

    def close(self) -> None:
        for each in self.sockets:
            each.close()


class Listening:
    """The part that servers have in common for their users: where they listen."""

    _addresses: list[tuple[str, int]]
    _metrics_port: int | None = None
    _http_port: int | None = None

    def _name_ports(self, ports: Ports) -> None:
        self._metrics_port = name_of(ports.metrics[0])[1] if ports.metrics else None
        self._http_port = name_of(ports.web[0])[1] if ports.web else None

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The addresses it listens on: [(host, port), ...]; a Unix socket is ("unix:PATH", 0)."""
        return self._addresses

    @property
    def port(self) -> int:
        """The TCP port it listens on; 0 if it listens only on a Unix socket."""
        return max(port for _, port in self._addresses)

    @property
    def metrics_port(self) -> int | None:
        """The port of its metrics endpoint; None without one."""
        return self._metrics_port

    @property
    def http_port(self) -> int | None:
        """The port that answers HTTP; None without one."""
        return self._http_port
