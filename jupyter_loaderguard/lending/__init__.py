"""A copy of a loader that can be run without a trace in the user's objects: for the doctor, and for tune."""
