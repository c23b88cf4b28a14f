"""The folder that ``ort-cuda-plugin exec`` puts on PYTHONPATH."""
