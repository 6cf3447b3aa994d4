"""The server's side: one module a method, a conversation with the parties."""
