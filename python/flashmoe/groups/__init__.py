"""How ranks find one another before they are a group, and how a process reaches the ranks that it has started.

* `launcher`: what a launcher tells the processes that it starts: who they are, and where they meet
* `meeting`: how ranks that share no memory exchange what they must know of one another
* `rendezvous`: ranks that meet at an address, where rank 0 listens
* `machine`: which ranks can share memory
* `link`: messages between a process and the ranks that `flashmoe.launch` has started for it
"""
