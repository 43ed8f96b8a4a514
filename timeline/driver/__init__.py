"""What a user's code holds: clients, producers, consumers, deliveries.

`client.py` opens everything else; `producer.py` and `mutation.py` send, `consumer.py` and `delivery.py` receive,
`line.py` keeps what is on its way until it has a definite answer, `channel.py` finds a broker, `transport.py` alone
knows gRPC. Nothing here but `background.py` and `handlers.py` uses a thread, and nothing reads a clock but through
`timeline.clock.Clock`.
"""
