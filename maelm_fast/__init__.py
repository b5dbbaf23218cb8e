"""maelm_fast: pretraining of text encoders by masked language modelling in which [MASK] never enters the encoder.

Importing this package loads no optional dependency, touches no accelerator and patches nothing.
"""

__version__ = "0.1.0"
