"""Health of the server's container: both its ports answer over TLS, with a certificate of the federation's CA, and
the silos that were registered before are registered again.

Standard library only: it runs every few seconds.
"""

import http.client
import socket
import ssl
import sys
from pathlib import Path

CA = "/server/ca.crt"
REGISTERED = Path("/tmp/registered")
SECONDS = 12.0  # for an answer, of a busy machine; the Dockerfile has the time of both
CONTROL, FLEET = ("control", 8000), ("superlink", 9092)


def main() -> str:
    """What is wrong; empty if nothing is."""
    if not REGISTERED.exists():
        return "the silos are not registered again yet"
    try:
        context = ssl.create_default_context(cafile=CA)
        connection = http.client.HTTPSConnection(*CONTROL, timeout=SECONDS, context=context)
        connection.request("GET", "/health")
        status = connection.getresponse().status
        if status != http.client.OK:
            return f"{CONTROL[0]}:{CONTROL[1]}/health answers {status}"
        context.set_alpn_protocols(["h2"])
        with socket.create_connection(FLEET, timeout=SECONDS) as plain:
            context.wrap_socket(plain, server_hostname=FLEET[0]).close()
    except OSError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main() or 0)
