"""The link through proxies that open TLS: gRPC's bytes in a WebSocket. `client/site` itself needs no `websockets`."""
