"""What a user's code holds: clients, producers, consumers, deliveries.

`client.py` opens everything else; `producer.py` and `mutations.py` send, `consumer.py` and `delivery.py` receive.
`produce/request_queue.py` keeps what is on its way until it has a definite answer, `transport/channel.py` finds a
broker, and `transport/grpc_transport.py` alone knows gRPC. Only `blocking/background.py` and `consume/handlers.py`
use threads, and all read the time from `timeline.clock.Clock`.
"""
