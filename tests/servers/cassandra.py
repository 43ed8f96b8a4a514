"""Cassandra as a process: one node on loopback, its commit log synced before it answers.

Only absolute imports: the driver's package is called `cassandra`, as this module is.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.servers.disk import in_memory
from tests.servers.process import Server, free_port
from tests.services import CASSANDRA_JARS

_JVM = (
    *("-Xmx512m", "-Xms256m", "-XX:+UseSerialGC", "-XX:-UsePerfData"),
    *(f"--add-exports=java.base/jdk.internal.{package}=ALL-UNNAMED" for package in ("misc", "ref")),
    *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in ("sun.nio.ch", "java.io")),
    *("-Dcassandra-foreground=yes", "-Dcassandra.skip_wait_for_gossip_to_settle=0", "-Dcassandra.ring_delay_ms=100"),
    "-Dcassandra.superuser_setup_delay_ms=0",
)
_LOGBACK = """<configuration>
  <appender name="OUT" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%level %msg%n%ex{3}</pattern></encoder>
  </appender>
  <root level="WARN"><appender-ref ref="OUT"/></root>
</configuration>
"""


class CassandraServer(Server):
    """One node. `commitlog_sync`: `batch`, or `periodic`, which loses what it acknowledged when it is killed.
    `guarded`: it asks for a password (that of `cassandra` is `cassandra`) and for rights, and offers TLS beside plain
    text, with the certificate of `certificate`. `measured`: for figures, which want a real disk and a compiler that
    takes its time; tests want neither, for what a kill leaves does not depend on the disk. `data`: where its data is to
    lie instead. `more`: more of its settings."""

    name = "cassandra"

    def __init__(
        self,
        folder: Path,
        commitlog_sync: str = "batch",
        guarded: bool = False,
        measured: bool = False,
        data: Path | None = None,
        more: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(folder)
        self.storage_port = free_port()
        self.commitlog_sync = commitlog_sync
        self.guarded = guarded
        self.measured = measured
        self.more = more or {}
        self._data = data

    @property
    def certificate(self) -> Path:
        """Who signed the node's certificate: itself."""
        return self.folder / "node.pem"

    @property
    def data(self) -> Path:
        """Where the node's data lies: in memory where there is enough of it."""
        if self._data is not None:
            return self._data
        memory = None if self.measured else in_memory()
        if memory is None:
            return self.folder / "data"
        self._data = Path(tempfile.mkdtemp(prefix="timeline-cassandra-", dir=memory))
        weakref.finalize(self, shutil.rmtree, self._data, ignore_errors=True)
        return self._data

    @property
    def url(self) -> str:
        return f"cassandra://127.0.0.1:{self.port}/timeline?replication=1"

    @property
    def command(self) -> Sequence[str]:
        return [
            shutil.which("java") or "java",
            *_JVM,
            *(() if self.measured else ("-XX:TieredStopAtLevel=1",)),
            f"-Dcassandra.config=file://{self.folder}/cassandra.yaml",
            f"-Dcassandra.storagedir={self.data}",
            f"-Dlogback.configurationFile={self.folder}/logback.xml",
            "-cp",
            f"{CASSANDRA_JARS}/*",
            "org.apache.cassandra.service.CassandraDaemon",
        ]

    def prepare(self) -> None:
        synced = {"commitlog_sync_period": "10s"} if self.commitlog_sync == "periodic" else {}
        guards = self._guards() if self.guarded else {}
        seeds = [{"seeds": f"127.0.0.1:{self.storage_port}"}]
        settings = {
            "cluster_name": "timeline",
            "num_tokens": 1,
            "allocate_tokens_for_local_replication_factor": 1,
            "partitioner": "org.apache.cassandra.dht.Murmur3Partitioner",
            "endpoint_snitch": "SimpleSnitch",
            "seed_provider": [{"class_name": "org.apache.cassandra.locator.SimpleSeedProvider", "parameters": seeds}],
            "listen_address": "127.0.0.1",
            "rpc_address": "127.0.0.1",
            "storage_port": self.storage_port,
            "native_transport_port": self.port,
            "auto_bootstrap": False,
            "commitlog_sync": self.commitlog_sync,
            "paxos_variant": "v2",
            # What a bucket in use for days meets: so many deletions that Cassandra does not read past them.
            **({} if self.measured else {"tombstone_warn_threshold": 1_000, "tombstone_failure_threshold": 5_000}),
            # A machine that is busy with other tests is no reason to give up what a moment later is done.
            **{f"{kind}_timeout": "30s" for kind in ("read_request", "write_request", "cas_contention", "request")},
            **synced,
            **guards,
            **self.more,
        }
        # JSON is YAML.
        (self.folder / "cassandra.yaml").write_text(json.dumps(settings, indent=1), encoding="utf-8")
        (self.folder / "logback.xml").write_text(_LOGBACK, encoding="utf-8")

    def _guards(self) -> dict[str, object]:
        store = self.folder / "node.p12"
        secret = ("-storepass", "keystore")
        key = ("-genkeypair", "-alias", "node", "-keyalg", "EC", "-dname", "CN=localhost", "-ext", "san=ip:127.0.0.1")
        self.run("keytool", *key, "-storetype", "PKCS12", "-keystore", str(store), *secret)
        export = ("-exportcert", "-rfc", "-alias", "node", "-file", str(self.certificate))
        self.run("keytool", *export, "-keystore", str(store), *secret)
        return {
            "authenticator": "PasswordAuthenticator",
            "authorizer": "CassandraAuthorizer",
            "client_encryption_options": {
                "enabled": True,
                "optional": True,
                "keystore": str(store),
                "keystore_password": "keystore",
            },
        }

    def ready(self) -> bool:
        return self.accepts()

    def stop(self) -> None:
        """At once: in order it takes five seconds and keeps no more than the commit log has."""
        self.kill()
