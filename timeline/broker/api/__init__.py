"""A broker's side of the wire: frames in, frames out."""
