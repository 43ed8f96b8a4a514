"""Webhooks: the rules of sending messages by POST, as a library without a process.

settings ─▶ addresses: where may it go? ─▶ circuit: does the receiver answer? ─▶ request: what is sent, signed
answer ─▶ settlement: what happens to the message
"""
