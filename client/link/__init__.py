"""The link through proxies that open TLS, in a WebSocket or in POSTs. `client/site` itself needs no `websockets`."""
