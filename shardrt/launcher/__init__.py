"""The processes around a job, which import little: supervisor on the first node, visitor on the others."""
