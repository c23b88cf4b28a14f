"""One declaration per operator: versions, types, and the lowering that is also its shape rule.

`registry` has the table; every other module here is imported by it, so that a new file needs no registration.
"""
