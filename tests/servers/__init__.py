"""Real servers for tests: each a process on loopback, on a free port, in a folder of its own, ended by its process id.

One module a server. `fixture.py` hands a running one to tests, one for each worker of a test run, started when the
first test asks for it; what a test kills or fills up, it starts for itself.
"""

from tests.servers.process import Server, free_port

__all__ = ["Server", "free_port"]
