"""The driver: clients, producers, consumers and deliveries.

`client.py` opens everything else. `producer.py` and `mutations.py` send; `consumer.py` and `delivery.py` receive.
`produce/request_queue.py` keeps requests until each has a definite answer. `transport/channel.py` finds a broker. Only
`transport/grpc_transport.py` knows gRPC. Only `blocking/calls.py` and `consume/handlers.py` use threads. All read the
time from `timeline.clock.Clock`.
"""
