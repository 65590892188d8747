"""The guard in IPython: the only room that imports it."""
