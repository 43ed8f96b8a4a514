"""MariaDB as a process, with its own settings for durability: each commit is on disk when it is answered."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.servers.process import Server

PASSWORD = "secret"


class MysqlServer(Server):
    """One MariaDB. `settings`: more of its options, as they stand on a command line."""

    name = "mysql"
    user = "mysql"

    def __init__(self, folder: Path, *settings: str) -> None:
        super().__init__(folder)
        self.settings = settings
        self._databases = 0

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def socket(self) -> Path:
        return self.folder / "sock"

    @property
    def url(self) -> str:
        self._databases += 1
        name = f"t{self._databases}"
        self.sql(f"CREATE DATABASE {name}")
        return f"mysql://timeline:{PASSWORD}@127.0.0.1:{self.port}/{name}"

    @property
    def command(self) -> Sequence[str]:
        program = shutil.which("mariadbd", path="/usr/sbin:/usr/bin") or "mariadbd"
        plain = ("--no-defaults", f"--datadir={self.data}", f"--socket={self.socket}", f"--port={self.port}")
        bound = ("--bind-address=127.0.0.1", "--skip-networking=0", "--skip-name-resolve", "--max-allowed-packet=192M")
        # A place of its own for temporary tables: a server that starts removes what others, and those that are being
        # installed, have in the machine's.
        small = ("--innodb-buffer-pool-size=128M", f"--pid-file={self.folder / 'pid'}", f"--tmpdir={self.folder}")
        return [program, *plain, *bound, *small, *self.settings]

    def prepare(self) -> None:
        kind = "--auth-root-authentication-method=normal"
        places = (f"--datadir={self.data}", f"--tmpdir={self.folder}")
        self.run("mariadb-install-db", "--no-defaults", *places, kind, "--skip-test-db")

    def ready(self) -> bool:
        return self.socket.exists() and self.accepts() and self._made_user()

    def _made_user(self) -> bool:
        try:
            self.sql(f"GRANT ALL ON *.* TO 'timeline'@'%' IDENTIFIED BY '{PASSWORD}'")
        except (TimeoutError, RuntimeError, OSError):
            return False
        return True

    def sql(self, statement: str) -> str:
        """Runs a statement as root; answers what it said."""
        done = subprocess.run(
            ["mariadb", "--no-defaults", "-uroot", f"-S{self.socket}", "-N", "-e", statement],
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        return done.stdout
