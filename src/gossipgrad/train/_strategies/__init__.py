"""The ways to keep replicas together, behind one small interface for the loop."""

from gossipgrad.train._strategies._gossip import gossip_settings as gossip_settings
from gossipgrad.train._strategies._make import make_strategy as make_strategy
from gossipgrad.train._strategies._strategy import Strategy as Strategy
