"""The server: sessions, queries, streaming and admission."""
