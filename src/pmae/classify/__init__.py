"""A classifier that is kept: labelled images in, a folder out that predicts, explains how sure it is, and exports."""
