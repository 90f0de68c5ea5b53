"""The model zoo: definitions with the standard topologies, and ``zoo.yaml``, which lists them with inputs and losses.

Listing (:mod:`.zoo`) needs no torch; building a model does.
"""
