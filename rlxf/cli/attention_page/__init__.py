"""Page that shows the attention of an agent over an episode: recorded steps, frames, and the HTML file."""
