"""Operators, one declaration each: versions, types, and the lowering that is also the shape rule.

`registry` has the operator table. It imports every module below this folder: a new file needs no registration. The
folder `onnx` has the operators of ai.onnx, `contrib` those of com.microsoft, `ml` those of ai.onnx.ml. A subfolder has
one subject.
"""
