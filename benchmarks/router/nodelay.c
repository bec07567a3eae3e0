/* Preloaded into a router that does not set TCP_NODELAY on the connections it accepts: sets it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

static int without_delay(int fd)
{
    int on = 1;
    if (fd >= 0)
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

int accept4(int fd, struct sockaddr *address, socklen_t *length, int flags)
{
    int (*real)(int, struct sockaddr *, socklen_t *, int) = dlsym(RTLD_NEXT, "accept4");
    return without_delay(real(fd, address, length, flags));
}

int accept(int fd, struct sockaddr *address, socklen_t *length)
{
    int (*real)(int, struct sockaddr *, socklen_t *) = dlsym(RTLD_NEXT, "accept");
    return without_delay(real(fd, address, length));
}
