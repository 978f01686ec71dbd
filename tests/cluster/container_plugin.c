// A SPANK plugin for the tests' Slurm cluster: srun's and sbatch's container options as pyxis defines them, so that job
// scripts which use them are tested as they are. An image is a directory with a root file system in it, laid out as an
// imported one: /etc/environment holds the image's variables (NAME=value), /etc/rc its entry point.
//
//   cc -std=c11 -Wall -Wextra -Werror -O2 -shared -fPIC -o container_plugin.so container_plugin.c  # libslurm-dev
//   plugstack.conf, beside slurm.conf:   required /path/to/container_plugin.so [login-shell]
//
// As in production: the image is read-only unless --container-writable, and then its changes go with the task; /tmp
// and /run are empty; /proc, /sys, /dev (and so /dev/shm), /etc/hosts and /etc/resolv.conf are the node's; the image's
// variables beat the job's unless --container-env names them; what does not exist (image, mount source, working
// directory) fails the step. With the argument `login-shell` the image's PATH is lost, as on sites that start
// containers by a login shell, in images whose /etc/profile sets PATH.
//
// Other than in production: nothing is downloaded or unpacked, there is no user namespace (the task keeps the user of
// the job whatever --container-remap-root says), and a named container is not kept for the next step.
//
// Everything is mounted in a mount namespace of the task's own: with its last process the kernel removes it all.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pwd.h>
#include <sched.h>
#include <slurm/spank.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

SPANK_PLUGIN(container_plugin, 1);

#define ENTRY_POINT "/etc/rc"
#define PROFILE_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
enum { MAX_MOUNTS = 64 };

// The request. A text is NULL, and a switch NOT_GIVEN, where the option was not given.
enum text { IMAGE, MOUNTS, WORKDIR, NAME, ENVIRONMENT, NUM_TEXTS };
enum toggle { WRITABLE, REMAP_ROOT, MOUNT_HOME, ENTRYPOINT, NUM_TOGGLES };
enum { NOT_GIVEN = 0, YES, NO };
static char *texts[NUM_TEXTS];
static int toggles[NUM_TOGGLES];
static bool login_shell;

#define REFUSE(...) (slurm_error("container: " __VA_ARGS__), -1)

// A switch's value for the callback: which, and whether on or off.
#define ON(toggle) ((toggle) * 4 + YES)
#define OFF(toggle) ((toggle) * 4 + NO)

static int set_text(int which, const char *argument, int remote) {
    (void)remote;
    if (!argument || !*argument) return REFUSE("an option without its argument");
    // Slurm may hand the same option over twice.
    if (texts[which] && strcmp(texts[which], argument))
        return REFUSE("an option given twice: %s and %s", texts[which], argument);
    if (!texts[which]) texts[which] = strdup(argument);
    if (which == MOUNTS && (argument[0] == ':' || strstr(argument, ",:") || strstr(argument, "::")))
        return REFUSE("--container-mounts: expected SRC:DST[:FLAGS], found %s", argument);
    return 0;
}

static int set_toggle(int value, const char *argument, int remote) {
    (void)argument, (void)remote;
    int *toggle = &toggles[value / 4], wanted = value % 4;
    if (*toggle != NOT_GIVEN && *toggle != wanted) return REFUSE("an option and its opposite were given");
    *toggle = wanted;
    return 0;
}

static struct spank_option options[] = {
    {"container-image", "DIRECTORY", "[test] directory with the image's root file system", 1, IMAGE, set_text},
    {"container-mounts", "SRC:DST[:FLAGS][,SRC:DST...]", "[test] bind mounts; flags: ro, rw", 1, MOUNTS, set_text},
    {"container-workdir", "PATH", "[test] working directory in the container", 1, WORKDIR, set_text},
    {"container-name", "NAME", "[test] accepted; nothing is kept under the name", 1, NAME, set_text},
    {"container-env", "NAME[,NAME...]", "[test] variables that the image does not override", 1, ENVIRONMENT, set_text},
    {"container-writable", NULL, "[test] let the task change its container", 0, ON(WRITABLE), set_toggle},
    {"container-readonly", NULL, "[test] do not (default)", 0, OFF(WRITABLE), set_toggle},
    {"container-remap-root", NULL, "[test] accepted; the user stays", 0, ON(REMAP_ROOT), set_toggle},
    {"no-container-remap-root", NULL, "[test] accepted; the user stays", 0, OFF(REMAP_ROOT), set_toggle},
    {"container-mount-home", NULL, "[test] mount the user's home", 0, ON(MOUNT_HOME), set_toggle},
    {"no-container-mount-home", NULL, "[test] do not (default)", 0, OFF(MOUNT_HOME), set_toggle},
    {"container-entrypoint", NULL, "[test] run the image's entry point", 0, ON(ENTRYPOINT), set_toggle},
    {"no-container-entrypoint", NULL, "[test] do not (default)", 0, OFF(ENTRYPOINT), set_toggle},
    SPANK_OPTIONS_TABLE_END};

// A mount that has been taken from the node and waits for its place in the container.
struct attachment {
    int tree;
    char *target;
    bool directory;
};
static struct attachment attachments[MAX_MOUNTS];
static int num_attachments;

// Takes `source` from the node. Sources are taken before the root changes and put in place after it, so that symbolic
// links are followed where they belong: in `source` on the node, in `target` in the image.
static int take(const char *source, const char *target, bool read_only) {
    struct stat status;
    struct mount_attr attributes = {.attr_set = MOUNT_ATTR_RDONLY};
    int tree = open_tree(AT_FDCWD, source, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE);
    if (tree < 0 || fstat(tree, &status)) return REFUSE("mount source %s: %s", source, strerror(errno));
    if (read_only && mount_setattr(tree, "", AT_EMPTY_PATH | AT_RECURSIVE, &attributes, sizeof attributes))
        return REFUSE("read-only mount of %s: %s", source, strerror(errno));
    if (num_attachments == MAX_MOUNTS) return REFUSE("more than %d mounts", MAX_MOUNTS);
    attachments[num_attachments++] = (struct attachment){tree, strdup(target), S_ISDIR(status.st_mode)};
    return 0;
}

static int take_from_node(spank_t spank) {
    static const struct {
        const char *path;
        bool read_only;
    } always[] = {{"/proc", false}, {"/sys", true}, {"/dev", false}, {"/etc/hosts", true}, {"/etc/resolv.conf", true}};
    for (size_t i = 0; i < sizeof always / sizeof *always; i++)
        if (!access(always[i].path, F_OK) && take(always[i].path, always[i].path, always[i].read_only)) return -1;

    if (toggles[MOUNT_HOME] == YES) {
        uid_t user;
        struct passwd *entry = NULL;
        if (!spank_get_item(spank, S_JOB_UID, &user)) entry = getpwuid(user);
        if (!entry || take(entry->pw_dir, entry->pw_dir, false)) return REFUSE("the user's home cannot be mounted");
    }

    char *rest = texts[MOUNTS] ? strdup(texts[MOUNTS]) : NULL;
    for (char *entry; (entry = strsep(&rest, ","));) {
        char *source = strsep(&entry, ":"), *target = strsep(&entry, ":"), *flags = entry;
        if (!target) target = source;
        if (*source != '/' || *target != '/') return REFUSE("mount %s:%s: expected absolute paths", source, target);
        if (flags && strcmp(flags, "ro") && strcmp(flags, "rw"))
            return REFUSE("mount flags %s: expected ro or rw", flags);
        if (take(source, target, flags && !strcmp(flags, "ro"))) return -1;
    }
    return 0;
}

// Makes the image the root: an overlay whose upper layer is memory, so that the image is never changed.
static int enter_image(const char *image) {
    int lower = open(image, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (lower < 0) return REFUSE("image %s: %s", image, strerror(errno));
    // The layers' memory hides the image's own path, of which only this task has no further need.
    char *layers = NULL;
    if (mount("layers", image, "tmpfs", 0, "mode=755") || chdir(image) || mkdir("upper", 0755) || mkdir("work", 0755) ||
        mkdir("root", 0755) || asprintf(&layers, "lowerdir=/proc/self/fd/%d,upperdir=upper,workdir=work", lower) < 0 ||
        mount("overlay", "root", "overlay", 0, layers))
        return REFUSE("overlay on %s: %s", image, strerror(errno));
    free(layers);
    close(lower);
    // The old root comes to lie on the new one, from where it is taken away.
    if (chdir("root") || syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH) || chdir("/"))
        return REFUSE("root of %s: %s", image, strerror(errno));
    return 0;
}

// Makes the directory or file on which something is to be mounted, and what leads to it.
static int make_target(const char *target, bool directory) {
    char *path = strdup(target);
    for (char *slash = path + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = '\0';
        mkdir(path, 0755);
    }
    free(path);
    if (directory) return mkdir(target, 0755) && errno != EEXIST ? -1 : 0;
    int file = open(target, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    // A link into nowhere, as /etc/resolv.conf is in images of machines with systemd.
    if (file < 0 && !unlink(target)) file = open(target, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    return file < 0 ? -1 : close(file);
}

static int attach_all(void) {
    static const char *const empty[] = {"/tmp", "/run"};
    for (size_t i = 0; i < sizeof empty / sizeof *empty; i++)
        if (make_target(empty[i], true) || mount("tmpfs", empty[i], "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777"))
            return REFUSE("%s: %s", empty[i], strerror(errno));
    for (int i = 0; i < num_attachments; i++) {
        struct attachment *one = &attachments[i];
        if (make_target(one->target, one->directory) ||
            move_mount(one->tree, "", AT_FDCWD, one->target, MOVE_MOUNT_F_EMPTY_PATH))
            return REFUSE("mount on %s: %s", one->target, strerror(errno));
        close(one->tree);
    }
    if (toggles[WRITABLE] != YES && mount(NULL, "/", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL))
        return REFUSE("read-only root: %s", strerror(errno));
    return 0;
}

// Whether --container-env names the variable.
static bool kept(const char *name) {
    size_t length = strlen(name);
    for (const char *at = texts[ENVIRONMENT]; at; at = strchr(at, ','), at = at ? at + 1 : NULL)
        if (!strncmp(at, name, length) && (at[length] == '\0' || at[length] == ',')) return true;
    return false;
}

static void set_variables(spank_t spank) {
    FILE *file = fopen("/etc/environment", "re");
    char *line = NULL;
    size_t size = 0;
    while (file && getline(&line, &size, file) > 0) {
        line[strcspn(line, "\n")] = '\0';
        char *value = strchr(line, '=');
        if (*line == '#' || !value) continue;
        *value++ = '\0';
        if (!kept(line)) spank_setenv(spank, line, value, 1);
    }
    free(line);
    if (file) fclose(file);
    if (login_shell && !access("/etc/profile", R_OK)) spank_setenv(spank, "PATH", PROFILE_PATH, 1);
}

int slurm_spank_init(spank_t spank, int num_arguments, char **arguments) {
    for (int i = 0; i < num_arguments; i++) {
        if (strcmp(arguments[i], "login-shell")) return REFUSE("unknown plugin argument %s", arguments[i]);
        login_shell = true;
    }
    for (struct spank_option *option = options; option->name; option++)
        if (spank_option_register(spank, option) != ESPANK_SUCCESS) return -1;
    return 0;
}

static int enter_container(spank_t spank) {
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
        return REFUSE("mount namespace: %s", strerror(errno));
    if (take_from_node(spank) || enter_image(texts[IMAGE]) || attach_all()) return -1;
    set_variables(spank);
    return 0;
}

// In the task's process, as root, before it becomes the job's user: the last moment to mount for a user other than
// root. Slurm then complains of the job's working directory, which containers need not have; root is spared that.
int slurm_spank_task_init_privileged(spank_t spank, int num_arguments, char **arguments) {
    (void)num_arguments, (void)arguments;
    uid_t user;
    if (!texts[IMAGE]) return texts[NAME] ? REFUSE("--container-name without --container-image") : 0;
    if (spank_get_item(spank, S_JOB_UID, &user)) return REFUSE("the job's user is not known");
    return user == 0 ? 0 : enter_container(spank);
}

// In the task's process, as the job's user, just before its program is started.
int slurm_spank_task_init(spank_t spank, int num_arguments, char **arguments) {
    (void)num_arguments, (void)arguments;
    if (!texts[IMAGE]) return 0;
    if (getuid() == 0 && enter_container(spank)) return -1;
    const char *directory = texts[WORKDIR] ? texts[WORKDIR] : "/";
    if (chdir(directory)) return REFUSE("working directory %s: %s", directory, strerror(errno));
    spank_setenv(spank, "PWD", directory, 1);
    if (toggles[ENTRYPOINT] != YES) return 0;

    // The entry point is given the task's command, and is expected to execute it.
    int count;
    char **command, **environment;
    if (spank_get_item(spank, S_JOB_ARGV, &count, &command) || spank_get_item(spank, S_JOB_ENV, &environment))
        return REFUSE("the task's command is not known");
    char **full = calloc(count + 3, sizeof *full);
    if (!full) return REFUSE("out of memory");
    full[0] = "/bin/sh", full[1] = ENTRY_POINT;
    memcpy(full + 2, command, count * sizeof *full);
    execve(full[0], full, environment);
    return REFUSE("entry point: %s", strerror(errno));
}
