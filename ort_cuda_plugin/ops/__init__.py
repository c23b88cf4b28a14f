"""Operators, one declaration each: versions, types, and the lowering that is also the shape rule.

`registry` has the table. It imports every module below this folder: a new file needs no registration. `onnx` has the
operators of ai.onnx, `contrib` those of com.microsoft, `ml` those of ai.onnx.ml, each in a folder for each subject.
"""
